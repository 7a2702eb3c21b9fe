//! Checks of processes before they move, requested as `holdfast check` requests them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{MigrationOutcome, ProcessCheck, SocketStrategy};
use holdfast_testbed::cluster::IpFamily;

use crate::database_session;
use crate::faults::{ACCEPTOR, DONOR, HOLDER};
use crate::world::{CountingProgram, MigrationGroup};

/// Commands that become the program with a property that prevents its migration, and the blocker that the check
/// reports.
const BLOCKED_COMMANDS: [(&[&str], &str); 4] = [
    (&["unshare", "--uts"], "a uts namespace of its own"),
    (
        &["sh", "-c", "sleep 600 | \"$@\"", "sh"],
        "its other end is held outside the tree",
    ),
    (&["sh", "-c", "exec \"$@\" </dev/kmsg", "sh"], "device 1:11"),
    (
        &["python3", "-c", ENTER_LANDLOCK_DOMAIN],
        "in a Landlock domain",
    ),
];

/// Python code that enters a Landlock domain, then becomes the program. The domain forbids only making block devices,
/// and nothing in procfs shows it.
const ENTER_LANDLOCK_DOMAIN: &str = "import ctypes, os, sys\n\
    kernel = ctypes.CDLL(None)\n\
    ruleset = kernel.syscall(444, (ctypes.c_uint64 * 1)(1 << 11), ctypes.c_size_t(8), 0)\n\
    kernel.prctl(38, 1, 0, 0, 0)\n\
    kernel.syscall(446, ruleset, 0)\n\
    os.execvp(sys.argv[1], sys.argv[1:])\n";

/// Checks the program's process on the node where it was started.
fn check_at_donor(world: &MigrationGroup, counter: &CountingProgram) -> Result<ProcessCheck> {
    let pid = world.pid_on(DONOR, counter)?;
    let control = world.cluster.blocking_control_client(DONOR)?;
    Ok(control.run(async |client| client.check(pid).await)?)
}

/// Processes that the check calls movable do move.
pub fn migrate_movable_processes(world: &MigrationGroup) -> Result<()> {
    let remote = database_session::start_database(world, "c1")?;
    let counters = [
        world.start(DONOR)?,
        database_session::start_client(world, DONOR, remote)?,
    ];
    for (counter, sockets) in counters.iter().zip([0, 1]) {
        let check = check_at_donor(world, counter)?;
        ensure!(
            check.movable && check.blockers.is_empty() && check.predicted_freeze_us > 0.0,
            "{check:?}"
        );
        ensure!(
            check.processes == [counter.last_count()?.pid]
                && check.threads > 0
                && check.mappings > 0,
            "{check:?}"
        );
        ensure!(
            check.memory_bytes > 0 && check.descriptors > 0 && check.sockets == sockets,
            "{check:?}"
        );
        ensure!(check.forwarded.len() as u64 == sockets, "{check:?}");
        // A check with an acceptor asks the acceptor too, and leaves no state there.
        let acceptor_check = world.check_to(check.pid, DONOR, ACCEPTOR)?;
        ensure!(
            acceptor_check.movable && acceptor_check.refusals.is_empty(),
            "{acceptor_check:?}"
        );
        ensure!(
            acceptor_check.to.as_deref() == Some(ACCEPTOR),
            "{acceptor_check:?}"
        );
        world.assert_goes_on(counter, DONOR)?;
        world.wait_until_clean(ACCEPTOR, counter.program_name())?;
        world.wait_until_no_transit()?;
        world.migrate_counter(counter, DONOR, ACCEPTOR)?;
        world.end(counter)?;
    }
    let control = world.cluster.blocking_control_client(DONOR)?;
    let missing_process = control.run(async |client| client.check(4_000_000).await);
    ensure!(missing_process.is_err(), "{missing_process:?}");
    let missing_node = control.run(async |client| client.check_to(1, "n9").await);
    ensure!(missing_node.is_err(), "{missing_node:?}");
    Ok(())
}

/// Blocked processes stay, and a check and an attempt name the same reason.
pub fn refuse_blocked_processes(world: &MigrationGroup) -> Result<()> {
    for (by, reason) in BLOCKED_COMMANDS {
        let counter = world.start_through(DONOR, by)?;
        assert_stays(world, &counter, reason).with_context(|| format!("{by:?}"))?;
        world.end(&counter)?;
    }
    Ok(())
}

/// A process with a session to a database on its own host over the loopback device stays: the session would break
/// silently.
pub fn refuse_loopback_session(world: &MigrationGroup) -> Result<()> {
    let addresses = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for address in addresses.map(|ip| SocketAddr::new(ip, database_session::PORT)) {
        database_session::start_database_at(world, DONOR, address)?;
        let counter = database_session::start_client(world, DONOR, address)?;
        let reason = format!("to {address} cannot leave this host, and another process has");
        assert_stays(world, &counter, &reason)?;
        // A copy keeps no connections: the copy is made, and ends by itself.
        let pid = world.pid_on(DONOR, &counter)?;
        let clone_status =
            world.wait_for_migration(DONOR, world.begin_copy(pid, DONOR, ACCEPTOR)?)?;
        ensure!(
            clone_status.outcome == MigrationOutcome::Cloned,
            "{clone_status:?}"
        );
        assert_original_goes_on(world, &counter)?;
        world.end(&counter)?;
    }
    // A session to an address of the host itself is named too.
    let own_address = world.cluster.address(DONOR, IpFamily::V4)?;
    let own_address = SocketAddr::new(own_address, database_session::PORT + 1);
    database_session::start_database_at(world, DONOR, own_address)?;
    let counter = database_session::start_client(world, DONOR, own_address)?;
    assert_stays(world, &counter, "stays within this host")?;
    world.end(&counter)
}

/// Checks that the original goes on. The copy may write one count that the original writes too, before it finds its
/// connection ended; if it had read the host name before the copy was made, the count is under the original's host.
fn assert_original_goes_on(world: &MigrationGroup, counter: &CountingProgram) -> Result<()> {
    let numbers = || -> Result<Vec<u64>> {
        let counts = counter.counts()?.into_iter();
        let donor_counts = counts.filter(|count| count.host == DONOR);
        let mut numbers: Vec<u64> = Vec::new();
        for count in donor_counts {
            if numbers.last().is_none_or(|last| *last < count.number) {
                numbers.push(count.number);
            }
        }
        Ok(numbers)
    };
    let before = numbers()?.len();
    world.wait("the original does not continue", || {
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
pub fn migrate_host_local_connections(world: &MigrationGroup) -> Result<()> {
    let counter = world.start_program(DONOR, &[], "near", &[])?;
    world.wait(
        "the program has not used each kind of connection yet",
        || Ok(counter.counts()?.len() > 60),
    )?;
    let check = check_at_donor(world, &counter)?;
    ensure!(check.movable, "{check:?}");
    for (from, to) in [(DONOR, ACCEPTOR), (ACCEPTOR, HOLDER), (HOLDER, DONOR)] {
        world.migrate_counter(&counter, from, to)?;
    }
    for socket_mode in [
        SocketStrategy::Incremental,
        SocketStrategy::Collective,
        SocketStrategy::Iterative,
    ] {
        for (from, to) in [(DONOR, ACCEPTOR), (ACCEPTOR, DONOR)] {
            let pid = world.pid_on(from, &counter)?;
            world.move_with_sockets(pid, from, to, socket_mode)?;
            let outcome = world.assert_goes_on(&counter, to);
            outcome.with_context(|| format!("{socket_mode:?}"))?;
        }
    }
    world.end(&counter)
}

fn assert_stays(world: &MigrationGroup, counter: &CountingProgram, reason: &str) -> Result<()> {
    let check = check_at_donor(world, counter)?;
    let named_blockers = check
        .blockers
        .iter()
        .filter(|of| of.reason.contains(reason));
    ensure!(!check.movable && named_blockers.count() == 1, "{check:?}");
    let pid = world.pid_on(DONOR, counter)?;
    let status = world.wait_for_migration(DONOR, world.begin(pid, DONOR, ACCEPTOR)?)?;
    let MigrationOutcome::Kept {
        reason: kept_reason,
        ..
    } = &status.outcome
    else {
        anyhow::bail!("the process moved: {status:?}");
    };
    ensure!(kept_reason.contains(reason), "{kept_reason}");
    world.assert_goes_on(counter, DONOR)
}
