//! What each step of a move costs, microseconds a connection, beside the figures of the feasibility study: pairs of
//! loopback connections in a network namespace of its own are frozen, and restored in another one.
//!
//! `cargo run --release -p holdfast-tcp-repair --example repair_cost [-- --threads 2]` (root).

use holdfast_sys::net::{Interface, add_address, set_up};
use holdfast_tcp_repair::{
    SocketPreparer, TcpDynamicState, WindowProbe, abandon, activate_all, extract_all, prepare_all,
    read_static_all, restore_all, set_deferred_options_and_timeout,
};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Instant;

/// Connections, then extract, prepare, restore and activate as the study measured them, one thread.
const STUDY_FIGURES: [(usize, [f64; 4]); 3] = [
    (1, [72.0, 73.0, 47.0, 10.0]),
    (64, [4.8, 8.0, 5.8, 0.5]),
    (1024, [4.2, 8.1, 5.4, 0.6]),
];
/// Runs of which the median is shown.
const RUNS: usize = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let threads = match arguments.iter().position(|word| word == "--threads") {
        Some(at) => arguments.get(at + 1).ok_or("--threads N")?.parse()?,
        None => 1,
    };
    println!(
        "us per connection, median of {RUNS}, {threads} thread(s); in brackets the study's, 1 thread"
    );
    println!(
        "{:>6} {:>16} {:>16} {:>16} {:>16} {:>10}",
        "N", "extract", "prepare", "restore", "activate", "static"
    );
    for (count, study) in STUDY_FIGURES {
        let mut runs: Vec<[f64; 5]> = (0..RUNS)
            .map(|_| run(count, threads))
            .collect::<Result<_, _>>()?;
        let mut median = |at: usize| {
            runs.sort_by(|a, b| a[at].total_cmp(&b[at]));
            runs[RUNS / 2][at]
        };
        let cells: Vec<String> = (0..4)
            .map(|at| format!("{:.1} ({})", median(at), study[at]))
            .collect();
        println!(
            "{count:>6} {:>16} {:>16} {:>16} {:>16} {:>10.1}",
            cells[0],
            cells[1],
            cells[2],
            cells[3],
            median(4)
        );
    }
    Ok(())
}

/// Microseconds per connection of extract, prepare, restore, activate and reading the static state.
fn run(count: usize, threads: usize) -> Result<[f64; 5], Box<dyn std::error::Error>> {
    new_namespace()?;
    let address: SocketAddr = "10.77.9.9:8080".parse()?;
    let lo = Interface::find("lo")?;
    set_up("lo")?;
    add_address(lo.index, address.ip(), 32)?;
    let listener = TcpListener::bind(address)?;
    let mut servers = Vec::with_capacity(count);
    let mut clients = Vec::with_capacity(count);
    for _ in 0..count {
        clients.push(TcpStream::connect(address)?);
        servers.push(listener.accept()?.0);
    }
    let sockets: Vec<_> = servers.iter().map(AsFd::as_fd).collect();
    let (static_us, fixed) = timed(count, || read_static_all(&sockets));
    let fixed: Vec<_> = fixed?.into_iter().collect::<Result<_, _>>()?;
    let pairs: Vec<_> = sockets.iter().copied().zip(&fixed).collect();
    let mut states = vec![TcpDynamicState::default(); count];
    let (extract_us, taken) = timed(count, || extract_all(&pairs, &mut states, threads));
    taken.into_iter().collect::<Result<Vec<()>, _>>()?;
    let mut acceptor = Vec::new();
    let mut times = [0.0; 3];
    // The other host: the same addresses in a namespace of its own, so the old sockets are not in the way.
    new_namespace()?;
    let lo = Interface::find("lo")?;
    set_up("lo")?;
    for ip in [address.ip(), "127.0.0.1".parse()?] {
        add_address(lo.index, ip, 32)?;
    }
    let preparer = SocketPreparer::new()?;
    let (us, prepared) = timed(count, || prepare_all(&preparer, &fixed, 1));
    times[0] = us;
    let mut work = Vec::with_capacity(count);
    for ((socket, fixed), state) in prepared.into_iter().zip(&fixed).zip(&states) {
        work.push((socket?, fixed, state));
    }
    let (us, restored) = timed(count, || restore_all(work, threads));
    times[1] = us;
    let mut work = Vec::with_capacity(count);
    for ((socket, fixed), state) in restored.into_iter().zip(&fixed).zip(&states) {
        work.push((socket?, fixed, state));
    }
    let (us, active) = timed(count, || activate_all(work, WindowProbe::Never, threads));
    times[2] = us;
    for (socket, fixed) in active.into_iter().zip(&fixed) {
        let socket = socket?;
        set_deferred_options_and_timeout(socket.as_fd(), fixed)?;
        acceptor.push(socket);
    }
    for server in &servers {
        abandon(server.as_fd())?;
    }
    // Silently too, as there is no client in this namespace.
    for socket in &acceptor {
        abandon(socket.as_fd())?;
    }
    Ok([extract_us, times[0], times[1], times[2], static_us])
}

fn timed<R>(count: usize, work: impl FnOnce() -> R) -> (f64, R) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_secs_f64() * 1e6 / count as f64, result)
}

/// Moves this thread (and the threads it starts) to a new network namespace.
fn new_namespace() -> std::io::Result<()> {
    // SAFETY: no pointers are passed.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}
