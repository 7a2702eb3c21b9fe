//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin handoff -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("handoff", holdfast_fuzz::handoff::run)
}
