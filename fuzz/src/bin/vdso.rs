//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin vdso -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("vdso", holdfast_fuzz::vdso::run)
}
