//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin app -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("app", holdfast_fuzz::program_messages::run)
}
