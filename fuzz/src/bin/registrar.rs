//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin registrar -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("registrar", holdfast_fuzz::registrar::run)
}
