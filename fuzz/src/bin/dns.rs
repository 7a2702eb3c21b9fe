//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin dns -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("dns", holdfast_fuzz::dns::run)
}
