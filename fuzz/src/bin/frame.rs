//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin frame -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("frame", holdfast_fuzz::frame::run)
}
