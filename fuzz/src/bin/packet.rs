//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin packet -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("packet", holdfast_fuzz::packet::run)
}
