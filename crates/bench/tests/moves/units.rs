//! Migrations of units with their control groups. No systemd runs here: a unit is represented by a control group of its
//! name, as systemd would create.

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{MigrationOutcome, UnitEntry};

use crate::faults::{ACCEPTOR, DONOR, HOLDER, nothing_is_written};
use crate::world::{Counter, World};

const UNIT: &str = "game.service";

/// Path of the unit's control group on every host, and a limit of the group that every kernel supports.
const GROUP: &str = "/sys/fs/cgroup/system.slice/game.service";
const LIMIT: (&str, &str) = ("cgroup.max.descendants", "3");

/// Shell text that enters the unit's group, then becomes a program.
const ENTER: &str =
    "mkdir -p $0 && echo $2 >$0/$1 && echo 0 >$0/cgroup.procs && shift 2 && exec \"$@\"";

fn start(world: &World) -> Result<Counter> {
    let enter = ["sh", "-c", ENTER, GROUP, LIMIT.0, LIMIT.1];
    world.start_by(DONOR, &enter)
}

/// Moves a unit twice; its control group moves each time, and is left at no other node.
pub fn follow(world: &World) -> Result<()> {
    let counter = start(world)?;
    for (from, to) in [(DONOR, ACCEPTOR), (ACCEPTOR, HOLDER)] {
        let pid = unit(world, from)?.pid;
        ensure!(
            pid == world.pid_on(from, &counter)?,
            "{pid} is not its process"
        );
        world.move_to(pid, from, to)?;
        world.goes_on(&counter, to)?;
        let there = unit(world, to)?;
        ensure!(there.group == "system.slice/game.service", "{there:?}");
        ensure!(there.pid == world.pid_on(to, &counter)?, "{there:?}");
        ensure!(read(world, to, LIMIT.0)?.as_deref() == Some(LIMIT.1));
        if from != DONOR {
            is_left(world, from)?;
        }
    }
    world.end(&counter)?;
    is_left(world, HOLDER)
}

/// If the unit already runs at the acceptor, its group there is not touched. If the acceptor's daemon dies, no group is
/// left there.
pub fn stay(world: &World) -> Result<()> {
    let counter = start(world)?;
    let other = world.start_by(ACCEPTOR, &["sh", "-c", ENTER, GROUP, LIMIT.0, "7"])?;
    let pid = unit(world, DONOR)?.pid;
    let status = world.ended(DONOR, world.begin(pid, DONOR, ACCEPTOR)?)?;
    let MigrationOutcome::Kept { reason } = &status.outcome else {
        anyhow::bail!("it moved: {status:?}");
    };
    ensure!(
        reason.contains("system.slice/game.service has processes"),
        "{reason}"
    );
    ensure!(read(world, ACCEPTOR, LIMIT.0)?.as_deref() == Some("7"));
    world.end(&other)?;

    let file = world.cluster.run_file(ACCEPTOR, "fault")?;
    let starts = world.cluster.daemon_starts(ACCEPTOR);
    std::fs::write(&file, "move-restore before die")?;
    world.begin(pid, DONOR, ACCEPTOR)?;
    world.wait("the daemon did not die", || {
        Ok(world.cluster.daemon_starts(ACCEPTOR) > starts)
    })?;
    world.cluster.wait_ready()?;
    world.wait("something is written down", || nothing_is_written(world))?;
    is_left(world, ACCEPTOR)?;
    world.goes_on(&counter, DONOR)?;
    world.end(&counter)
}

fn unit(world: &World, node: &str) -> Result<UnitEntry> {
    let control = world.cluster.control_blocking(node)?;
    let unit = control.run(async |client| client.unit(UNIT).await);
    unit.with_context(|| format!("{UNIT} on {node}"))
}

/// Returns the content of a file of the group on a host; none if the host has no such group.
fn read(world: &World, node: &str, file: &str) -> Result<Option<String>> {
    let mut cat = world.cluster.lab().command(node)?;
    let output = cat.args(["cat", &format!("{GROUP}/{file}")]).output()?;
    let text = String::from_utf8(output.stdout)?;
    Ok(output.status.success().then(|| text.trim().to_owned()))
}

/// Waits until the host has no such group.
fn is_left(world: &World, node: &str) -> Result<()> {
    world
        .wait("its group is left", || {
            Ok(read(world, node, LIMIT.0)?.is_none())
        })
        .with_context(|| format!("on {node}"))
}
