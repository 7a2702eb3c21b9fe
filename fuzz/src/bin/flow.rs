//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin flow -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("flow", holdfast_fuzz::flow::run)
}
