//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin arena -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("arena", holdfast_fuzz::arena::run)
}
