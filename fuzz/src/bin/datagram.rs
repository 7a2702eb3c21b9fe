//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin datagram -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("datagram", holdfast_fuzz::datagram::run)
}
