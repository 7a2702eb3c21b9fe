//! Units move with their control groups. No systemd runs here: a unit is what systemd makes of it, a control group of its name.

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{MigrationOutcome, UnitEntry};

use crate::faults::{ACCEPTOR, DONOR, HOLDER, nothing_is_written};
use crate::world::{Counter, World};

const UNIT: &str = "game.service";

/// Where the group of the unit is on every host, and a limit that it has, which a group has on any kernel.
const GROUP: &str = "/sys/fs/cgroup/system.slice/game.service";
const LIMIT: (&str, &str) = ("cgroup.max.descendants", "3");

/// Becomes the unit, and then a program.
const ENTER: &str =
    "mkdir -p $0 && echo $2 >$0/$1 && echo 0 >$0/cgroup.procs && shift 2 && exec \"$@\"";

fn start(world: &World) -> Result<Counter> {
    let enter = ["sh", "-c", ENTER, GROUP, LIMIT.0, LIMIT.1];
    world.start_by(DONOR, &enter)
}

/// A unit moves on twice; its group follows each time, and is left nowhere.
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

/// Where the unit runs already, or the daemon dies, the group is not touched, or not left.
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

/// What a file of the group says on a host; none where there is no group.
fn read(world: &World, node: &str, file: &str) -> Result<Option<String>> {
    let mut cat = world.cluster.lab().command(node)?;
    let output = cat.args(["cat", &format!("{GROUP}/{file}")]).output()?;
    let text = String::from_utf8(output.stdout)?;
    Ok(output.status.success().then(|| text.trim().to_owned()))
}

/// Waits until nobody has the group there.
fn is_left(world: &World, node: &str) -> Result<()> {
    world
        .wait("its group is left", || {
            Ok(read(world, node, LIMIT.0)?.is_none())
        })
        .with_context(|| format!("on {node}"))
}
