//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin replication -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("replication", holdfast_fuzz::replication::run)
}
