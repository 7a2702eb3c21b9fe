//! tmp
#![forbid(unsafe_code)]
use clap::Parser;
#[derive(Parser)]
enum Cmd {
    #[command(subcommand)]
    Bench(B),
}
#[derive(clap::Subcommand)]
enum B {
    Registrar(holdfast_bench::registrar::RegistrarArgs),
}
fn main() -> anyhow::Result<()> {
    let Cmd::Bench(B::Registrar(a)) = Cmd::parse();
    holdfast_bench::registrar::run(&a)
}
