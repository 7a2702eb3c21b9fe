//! What the sockets of a process cost its freeze, in the three ways of paper 002 section V-B: microseconds by phase and
//! bytes that cross in the freeze. A server with connections on loopback, in a network namespace of its own, is stopped,
//! and its connections are restored in another one.
//!
//! `cargo run --release -p holdfast-node --example socket_ways [-- CONNECTIONS [PERCENT]]` (root). PERCENT of the
//! connections exchange 256 bytes between the last round and the freeze.

#![forbid(unsafe_code)]

mod acceptor;
mod server;

use acceptor::{Acceptor, Answer};
use holdfast_node::dataplane::{Descriptors, Followed};
use holdfast_sys::net::{Interface, add_address, set_up};
use holdfast_sys::process::files::{Copier, Draft, Limits, Stock};
use holdfast_sys::process::sockets::{Held, SocketState, SocketStatic, Told, Way};
use nix::sched::{CloneFlags, unshare};
use server::Server;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// Runs of each way; the worst is shown, as in the paper.
const RUNS: usize = 5;
/// Rounds before the freeze, when sockets move incrementally.
const ROUNDS: usize = 3;
/// Threads that extract and restore.
const THREADS: usize = 2;

/// Phases of a freeze, in their order.
const PHASES: [&str; 6] = [
    "look",
    "descriptors",
    "extract",
    "encode",
    "restore",
    "activate",
];

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    Stock::raise_limit()?;
    if words.first().is_some_and(|word| word == "serve") {
        return server::serve();
    }
    let number = |at: usize, default| words.get(at).map_or(Ok(default), |word| word.parse());
    let (count, percent) = (number(0, 1024usize)?, number(1, 10usize)?);
    new_namespace()?;
    let server = Server::start(count)?;
    println!(
        "{count} connections, {percent} % exchange 256 bytes after the last round; microseconds, worst of {RUNS}, {THREADS} threads"
    );
    print!("{:<12}", "");
    PHASES.iter().for_each(|phase| print!("{phase:>12}"));
    println!("{:>12}{:>12}{:>10}", "all", "bytes", "changed");
    for way in [Way::Iterative, Way::Collective, Way::Incremental] {
        let mut runs = Vec::new();
        for _ in 0..RUNS {
            runs.push(run(&server, way, percent)?);
        }
        runs.sort_by_key(|run| run.phases_us.iter().sum::<u64>());
        if let Some(worst) = runs.last() {
            worst.print(way);
        }
    }
    Ok(())
}

/// One freeze.
#[derive(Default)]
struct Run {
    phases_us: [u64; 6],
    bytes: usize,
    changed: usize,
}

impl Run {
    fn print(&self, way: Way) {
        print!("{:<12}", format!("{way:?}").to_lowercase());
        self.phases_us.iter().for_each(|us| print!("{us:>12}"));
        let all: u64 = self.phases_us.iter().sum();
        println!("{all:>12}{:>12}{:>10}", self.bytes, self.changed);
    }

    /// Adds the time since `from` to a phase, and goes on from now.
    fn note(&mut self, phase: usize, from: &mut Instant) {
        self.phases_us[phase] += from.elapsed().as_micros() as u64;
        *from = Instant::now();
    }
}

/// Moves this thread, and those it starts, to a network namespace with the server's address.
fn new_namespace() -> Result<(), Box<dyn Error>> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    let lo = Interface::find("lo")?;
    set_up("lo")?;
    add_address(lo.index, server::ADDRESS.ip(), 32)?;
    Ok(())
}

fn run(server: &Server, way: Way, percent: usize) -> Result<Run, Box<dyn Error>> {
    let pids = [server.pid()];
    let descriptors = Descriptors::new();
    let draft = Draft::save(&pids, &Limits::default())?;
    let acceptor = Acceptor::start();
    // Incrementally, options go ahead too; otherwise they are part of the freeze.
    let (mut followed, mut told) = (Followed::new()?, Told::default());
    if way == Way::Incremental {
        acceptor.prepare(&statics(&draft.sockets))?;
        let mut copier = Copier::default();
        for (id, place) in &draft.places {
            if matches!(*draft.sockets[id], SocketStatic::Connection(_)) {
                followed.follow(*id, copier.copy(*place)?.as_fd())?;
            }
        }
        for _ in 0..ROUNDS {
            let look = followed.look()?;
            let changes = told.changes(look.states);
            acceptor.inject(postcard::to_stdvec(&changes)?, look.at_us)?;
        }
    }
    server.exchange(percent)?;
    server.stop()?;

    let mut run = Run::default();
    let mut now = Instant::now();
    let (mut states, mut seen, mut at_us) = (BTreeMap::new(), BTreeSet::new(), None);
    if way == Way::Incremental {
        let look = followed.look()?;
        seen = look.states.keys().copied().collect();
        at_us = Some(look.at_us);
        states = told.changes(look.states);
    }
    run.note(0, &mut now);
    let listings = descriptors
        .list(&pids)
        .ok_or("no iterator over descriptors")?;
    let frozen = draft.save_frozen_listed(&pids, listings, &seen)?;
    let fixed = |id: &u32| frozen.fixed.get(id).unwrap_or(&draft.sockets[id]);
    let sockets: BTreeMap<u32, Sock> = frozen
        .sockets
        .into_iter()
        .map(|(id, copy)| (id, (copy, Arc::clone(fixed(&id)))))
        .collect();
    run.note(1, &mut now);
    let held = extract_and_send(&acceptor, &mut run, &mut now, way, (sockets, states, at_us))?;
    acceptor.activate()?;
    run.note(5, &mut now);

    drop(held);
    acceptor.check()?;
    server.go_on()?;
    Ok(run)
}

type Sock = (OwnedFd, Arc<SocketStatic>);
type States = BTreeMap<u32, SocketState>;

/// One message for all, or one for each socket.
fn extract_and_send(
    acceptor: &Acceptor,
    run: &mut Run,
    now: &mut Instant,
    way: Way,
    (sockets, mut states, at_us): (BTreeMap<u32, Sock>, States, Option<u64>),
) -> Result<Vec<Held>, Box<dyn Error>> {
    let batches: Vec<BTreeMap<u32, Sock>> = match way {
        Way::Iterative => sockets
            .into_iter()
            .map(|one| BTreeMap::from([one]))
            .collect(),
        Way::Collective | Way::Incremental => vec![sockets],
    };
    let mut all = Vec::new();
    for batch in batches {
        let options = match way {
            Way::Incremental => BTreeMap::new(),
            _ => batch
                .iter()
                .map(|(id, (_, fixed))| (*id, (**fixed).clone()))
                .collect(),
        };
        let mut held = Held::new(batch);
        states.extend(held.extract(THREADS)?);
        all.push(held);
        run.changed += states.len();
        run.note(2, now);
        let message = postcard::to_stdvec(&(options, std::mem::take(&mut states), at_us))?;
        run.bytes += message.len();
        run.note(3, now);
        acceptor.restore(message)?;
        run.note(4, now);
    }
    Ok(all)
}

fn statics(sockets: &BTreeMap<u32, Arc<SocketStatic>>) -> BTreeMap<u32, SocketStatic> {
    sockets
        .iter()
        .map(|(id, fixed)| (*id, (**fixed).clone()))
        .collect()
}

/// What an answer of the acceptor's says.
fn done(answer: Answer) -> Result<(), Box<dyn Error>> {
    answer.map_err(Into::into)
}
