//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin conductor -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("conductor", holdfast_fuzz::conductor::run)
}
