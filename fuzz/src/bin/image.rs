//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin image -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("image", holdfast_fuzz::image::run)
}
