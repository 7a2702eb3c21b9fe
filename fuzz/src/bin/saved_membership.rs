//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin saved_membership -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("saved_membership", holdfast_fuzz::saved_membership::run)
}
