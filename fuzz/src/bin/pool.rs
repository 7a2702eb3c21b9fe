//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin pool -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("pool", holdfast_fuzz::pool_messages::run)
}
