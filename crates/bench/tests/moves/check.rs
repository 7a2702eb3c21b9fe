//! Checks of processes before they move, requested as `holdfast check` requests them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{MigrationOutcome, ProcessCheck, SocketsWay};
use holdfast_bench::cluster::Family;

use crate::faults::{ACCEPTOR, DONOR, HOLDER};
use crate::session;
use crate::world::{Counter, World};

/// Commands that become the program with a property that prevents its migration, and the blocker that the check
/// reports.
const BLOCKED: [(&[&str], &str); 4] = [
    (&["unshare", "--uts"], "a uts namespace of its own"),
    (
        &["sh", "-c", "sleep 600 | \"$@\"", "sh"],
        "its other end is held outside the tree",
    ),
    (&["sh", "-c", "exec \"$@\" </dev/kmsg", "sh"], "device 1:11"),
    (&["python3", "-c", IN_A_DOMAIN], "in a Landlock domain"),
];

/// Python code that enters a Landlock domain, then becomes the program. The domain forbids only making block devices,
/// and nothing in procfs shows it.
const IN_A_DOMAIN: &str = "import ctypes, os, sys\n\
    kernel = ctypes.CDLL(None)\n\
    ruleset = kernel.syscall(444, (ctypes.c_uint64 * 1)(1 << 11), ctypes.c_size_t(8), 0)\n\
    kernel.prctl(38, 1, 0, 0, 0)\n\
    kernel.syscall(446, ruleset, 0)\n\
    os.execvp(sys.argv[1], sys.argv[1:])\n";

/// Checks the program's process on the node where it was started.
fn ask(world: &World, counter: &Counter) -> Result<ProcessCheck> {
    let pid = world.pid_on(DONOR, counter)?;
    let control = world.cluster.control_blocking(DONOR)?;
    Ok(control.run(async |client| client.check(pid).await)?)
}

/// Processes that the check calls movable do move.
pub fn movable(world: &World) -> Result<()> {
    let remote = session::database(world, "c1")?;
    let counters = [world.start(DONOR)?, session::client(world, DONOR, remote)?];
    for (counter, sockets) in counters.iter().zip([0, 1]) {
        let check = ask(world, counter)?;
        ensure!(
            check.movable && check.blockers.is_empty() && check.predicted_freeze_us > 0.0,
            "{check:?}"
        );
        ensure!(
            check.processes == [counter.last()?.pid] && check.threads > 0 && check.mappings > 0,
            "{check:?}"
        );
        ensure!(
            check.memory_bytes > 0 && check.descriptors > 0 && check.sockets == sockets,
            "{check:?}"
        );
        ensure!(check.forwarded.len() as u64 == sockets, "{check:?}");
        // A check with an acceptor asks the acceptor too, and leaves no state there.
        let asked = world.check_to(check.pid, DONOR, ACCEPTOR)?;
        ensure!(asked.movable && asked.refusals.is_empty(), "{asked:?}");
        ensure!(asked.to.as_deref() == Some(ACCEPTOR), "{asked:?}");
        world.goes_on(counter, DONOR)?;
        world.nothing_is_left(ACCEPTOR, counter.program())?;
        world.nothing_is_in_transit()?;
        world.migrate(counter, DONOR, ACCEPTOR)?;
        world.end(counter)?;
    }
    let control = world.cluster.control_blocking(DONOR)?;
    let nobody = control.run(async |client| client.check(4_000_000).await);
    ensure!(nobody.is_err(), "{nobody:?}");
    let nowhere = control.run(async |client| client.check_to(1, "n9").await);
    ensure!(nowhere.is_err(), "{nowhere:?}");
    Ok(())
}

/// Blocked processes stay, and a check and an attempt name the same reason.
pub fn blocked(world: &World) -> Result<()> {
    for (by, reason) in BLOCKED {
        let counter = world.start_by(DONOR, by)?;
        stays(world, &counter, reason).with_context(|| format!("{by:?}"))?;
        world.end(&counter)?;
    }
    Ok(())
}

/// A process with a session to a database on its own host over the loopback device stays: the session would break
/// silently.
pub fn over_loopback(world: &World) -> Result<()> {
    let addresses = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for address in addresses.map(|ip| SocketAddr::new(ip, session::PORT)) {
        session::serve(world, DONOR, address)?;
        let counter = session::client(world, DONOR, address)?;
        let reason = format!("to {address} cannot leave this host, and another process has");
        stays(world, &counter, &reason)?;
        // A copy keeps no connections: the copy is made, and ends by itself.
        let pid = world.pid_on(DONOR, &counter)?;
        let copied = world.ended(DONOR, world.begin_copy(pid, DONOR, ACCEPTOR)?)?;
        ensure!(copied.outcome == MigrationOutcome::Cloned, "{copied:?}");
        original_goes_on(world, &counter)?;
        world.end(&counter)?;
    }
    // A session to an address of the host itself is named too.
    let own = world.cluster.address(DONOR, Family::V4)?;
    let own = SocketAddr::new(own, session::PORT + 1);
    session::serve(world, DONOR, own)?;
    let counter = session::client(world, DONOR, own)?;
    stays(world, &counter, "stays within this host")?;
    world.end(&counter)
}

/// Checks that the original goes on. The copy may write one count that the original writes too, before it finds its
/// connection ended; if it had read the host name before the copy was made, the count is under the original's host.
fn original_goes_on(world: &World, counter: &Counter) -> Result<()> {
    let numbers = || -> Result<Vec<u64>> {
        let counts = counter.counts()?.into_iter();
        let own = counts.filter(|count| count.host == DONOR);
        let mut numbers: Vec<u64> = Vec::new();
        for count in own {
            if numbers.last().is_none_or(|last| *last < count.number) {
                numbers.push(count.number);
            }
        }
        Ok(numbers)
    };
    let before = numbers()?.len();
    world.wait("the original does not go on", || {
        Ok(numbers()?.len() > before + 5)
    })?;
    let numbers = numbers()?;
    ensure!(
        numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]),
        "{numbers:?}"
    );
    Ok(())
}

/// Connections within the host move with the process, in any state and in each socket transfer mode.
pub fn near(world: &World) -> Result<()> {
    let counter = world.start_program(DONOR, &[], "near", &[])?;
    world.wait("it has not had all", || Ok(counter.counts()?.len() > 60))?;
    let check = ask(world, &counter)?;
    ensure!(check.movable, "{check:?}");
    for (from, to) in [(DONOR, ACCEPTOR), (ACCEPTOR, HOLDER), (HOLDER, DONOR)] {
        world.migrate(&counter, from, to)?;
    }
    for way in [
        SocketsWay::Incremental,
        SocketsWay::Collective,
        SocketsWay::Iterative,
    ] {
        for (from, to) in [(DONOR, ACCEPTOR), (ACCEPTOR, DONOR)] {
            let pid = world.pid_on(from, &counter)?;
            world.move_by(pid, from, to, way)?;
            let went = world.goes_on(&counter, to);
            went.with_context(|| format!("{way:?}"))?;
        }
    }
    world.end(&counter)
}

fn stays(world: &World, counter: &Counter, reason: &str) -> Result<()> {
    let check = ask(world, counter)?;
    let named = check
        .blockers
        .iter()
        .filter(|of| of.reason.contains(reason));
    ensure!(!check.movable && named.count() == 1, "{check:?}");
    let pid = world.pid_on(DONOR, counter)?;
    let status = world.ended(DONOR, world.begin(pid, DONOR, ACCEPTOR)?)?;
    let MigrationOutcome::Kept { reason: why } = &status.outcome else {
        anyhow::bail!("it moved: {status:?}");
    };
    ensure!(why.contains(reason), "{why}");
    world.goes_on(counter, DONOR)
}
