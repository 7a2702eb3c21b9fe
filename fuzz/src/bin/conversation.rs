//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin conversation -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("conversation", holdfast_fuzz::migration_messages::run)
}
