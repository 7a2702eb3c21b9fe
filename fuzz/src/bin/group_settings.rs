//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin group_settings -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("group_settings", holdfast_fuzz::group_settings::run)
}
