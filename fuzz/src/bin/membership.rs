//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin membership -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("membership", holdfast_fuzz::membership::run)
}
