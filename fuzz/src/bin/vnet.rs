//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin vnet -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("vnet", holdfast_fuzz::vnet_header::run)
}
