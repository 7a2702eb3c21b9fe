//! Measures the cost of each step of a freeze, and prints it:
//! `cargo test --release -p holdfast-checkpoint --test process measure -- --ignored --nocapture`.

use crate::migration::{Host, restorer};
use crate::program::Program;
use holdfast_checkpoint::acceptor::Restorer;
use holdfast_checkpoint::donor::TreeTracker;
use holdfast_checkpoint::sockets::RestoredSockets;
use holdfast_lab::testing::{SERVICE_V4, SERVICE_V6, TestNetwork};
use holdfast_tcp_repair::WindowProbe;
use std::net::TcpStream;
use std::time::{Duration, Instant};

const RUNS: usize = 7;
const CONNECTIONS: usize = 1024;

#[test]
#[ignore = "measures, and checks nothing"]
fn measure_freeze() {
    for idle in [0, CONNECTIONS] {
        let runs: Vec<StepTimes> = (0..RUNS).map(|_| run(idle)).collect();
        println!("{idle} connections and 24 other descriptors, median and maximum of {RUNS}:");
        print_steps(&runs);
    }
}

/// Trees like a server with one process per session, a server with one thread per session, and a process with the
/// largest possible number of mappings.
#[test]
#[ignore = "measures, and checks nothing"]
fn measure_freeze_of_large_trees() {
    for (description, arguments) in [
        ("27 processes", ["27", "1", "0"]),
        ("300 threads", ["1", "300", "0"]),
        ("65,000 mappings", ["1", "1", "65000"]),
    ] {
        let runs: Vec<StepTimes> = (0..RUNS).map(|_| run_many(&arguments)).collect();
        println!("{description}, median and maximum of {RUNS}:");
        print_steps(&runs);
    }
}

fn run_many(arguments: &[&str]) -> StepTimes {
    let program = Program::start_with("large_trees", arguments);
    program.assert_runs_on();
    let pid = program.pid();
    let moving = move || move_measured(pid, &Host::local(), &Host::new());
    std::thread::spawn(moving).join().expect("moves")
}

fn print_steps(runs: &[StepTimes]) {
    for (at, (name, _)) in runs[0].0.iter().enumerate() {
        let mut times: Vec<Duration> = runs.iter().map(|steps| steps.0[at].1).collect();
        times.sort();
        println!(
            "  {name:<44} {:>10.0?} {:>10.0?}",
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
}

#[derive(Default)]
struct StepTimes(Vec<(&'static str, Duration)>);

impl StepTimes {
    fn time<R>(&mut self, name: &'static str, work: impl FnOnce() -> R) -> R {
        let started = Instant::now();
        let result = work();
        self.0.push((name, started.elapsed()));
        result
    }
}

fn run(idle: usize) -> StepTimes {
    let net = TestNetwork::new();
    let addresses = [SERVICE_V4.to_string(), SERVICE_V6.to_string()];
    let program = net
        .a
        .run(|| Program::start_with("server", &[&addresses[0], &addresses[1]]));
    let clients: Vec<TcpStream> = net.client.run(|| {
        let connect = |_| TcpStream::connect((SERVICE_V4, 8080)).expect("connects");
        (0..idle).map(connect).collect()
    });
    program.assert_runs_on();
    let steps = std::thread::scope(|scope| {
        let moving = || {
            let [from, to] = [&net.a, &net.b].map(|namespace| namespace.run(Host::local));
            move_measured(program.pid(), &from, &to)
        };
        scope.spawn(moving).join().expect("moves")
    });
    drop(clients);
    steps
}

/// Moves a tree step by step, and ends it at the acceptor.
fn move_measured(root: i32, from: &Host, to: &Host) -> StepTimes {
    let mut steps = StepTimes::default();
    to.enter();
    let restorer = restorer();
    let sockets = RestoredSockets::new(1024).expect("sockets");
    from.enter();
    let mut tracker = TreeTracker::start(root).expect("starts");
    let mut acceptor = (restorer, sockets);
    precopy(&mut tracker, &mut acceptor, [from, to], &mut steps);
    let (mut restorer, mut sockets) = acceptor;
    let mut stopped = steps
        .time("stop, mappings, dirty pages", || tracker.freeze())
        .map_err(|unfrozen| unfrozen.error)
        .expect("stops");
    let descriptors = steps
        .time("donor: descriptors", || stopped.read_descriptors())
        .expect("inspected");
    let states = steps
        .time("donor: sockets", || stopped.extract_sockets(2, |_| false))
        .expect("extracted");
    let frozen = steps
        .time("donor: state", || stopped.read_state())
        .expect("state");
    steps
        .time("acceptor: tree", || restorer.update_tree(stopped.tree()))
        .expect("made");
    steps.time("read and write pages", || {
        while let Some(pages) = stopped.read_pages(1 << 20).expect("read") {
            restorer.write_pages(pages).expect("written");
        }
    });
    to.enter();
    steps.time("acceptor: descriptors", || {
        sockets
            .prepare(&descriptors.sockets, &descriptors.removed)
            .expect("prepared");
        restorer
            .finish_descriptors(&descriptors, &sockets.new_sockets())
            .expect("made");
    });
    steps
        .time("acceptor: sockets", || sockets.restore(states, 2))
        .expect("restored");
    steps
        .time("acceptor: state", || restorer.restore_state(&frozen))
        .expect("given");
    steps
        .time("acceptor: sockets on", || {
            sockets.activate(WindowProbe::Never, 2)
        })
        .expect("active");
    steps
        .time("acceptor: resume", || restorer.resume())
        .expect("runs");
    steps
        .time("after: donor's sockets and processes end", || {
            stopped.release()
        })
        .expect("released");
    steps
}

/// Runs two pre-copy rounds while the tree runs.
fn precopy(
    tracker: &mut TreeTracker,
    (restorer, sockets): &mut (Restorer, RestoredSockets),
    [from, to]: [&Host; 2],
    steps: &mut StepTimes,
) {
    for name in [
        "before: first reading of descriptors",
        "before: second reading",
    ] {
        let mut round = tracker.next_round().expect("a round");
        restorer.update_tree(&round.tree).expect("made");
        while let Some(pages) = tracker.read_pages(&mut round, 1 << 20).expect("read") {
            restorer.write_pages(pages).expect("written");
        }
        let descriptors = steps
            .time(name, || tracker.read_descriptors())
            .expect("inspected");
        to.enter();
        sockets
            .prepare(&descriptors.sockets, &descriptors.removed)
            .expect("prepared");
        from.enter();
        restorer
            .update_descriptors(&descriptors, &sockets.new_sockets())
            .expect("made");
        sockets.mark_handed_over();
    }
}
