//! `cargo run --release --manifest-path fuzz/Cargo.toml --bin enrolment -- --seconds 10`
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    holdfast_fuzz::driver::main("enrolment", holdfast_fuzz::enrolment::run)
}
