//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin asap -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("asap", holdfast_fuzz::rserpool::asap)
}
