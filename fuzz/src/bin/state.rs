//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin state -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("state", holdfast_fuzz::socket_state::run)
}
