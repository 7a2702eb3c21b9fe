//! First process of a moved tree's PID namespace: see `holdfast_checkpoint::acceptor`.

#[cfg(target_arch = "x86_64")]
fn main() {
    std::process::exit(holdfast_checkpoint::acceptor::run_restorer());
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    if let Err(error) = holdfast_checkpoint::supported() {
        eprintln!("{error}");
    }
    std::process::exit(1);
}
