//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin enrp -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("enrp", holdfast_fuzz::rserpool::enrp)
}
