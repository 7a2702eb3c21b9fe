//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin stream -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("stream", holdfast_fuzz::asap_stream::run)
}
