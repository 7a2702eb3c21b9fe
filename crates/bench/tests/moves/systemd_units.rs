//! Migrations of units with their control groups. No systemd runs here: a unit is represented by a control group of its
//! name, as systemd would create.

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{MigrationOutcome, UnitEntry};

use crate::faults::{ACCEPTOR, DONOR, HOLDER, no_move_records_left};
use crate::world::{CountingProgram, MigrationGroup};

const UNIT: &str = "game.service";

/// Path of the unit's control group on every host, and a limit of the group that every kernel supports.
const CGROUP: &str = "/sys/fs/cgroup/system.slice/game.service";
const CGROUP_LIMIT: (&str, &str) = ("cgroup.max.descendants", "3");

/// Shell text that enters the unit's group, then becomes a program.
const ENTER_CGROUP: &str =
    "mkdir -p $0 && echo $2 >$0/$1 && echo 0 >$0/cgroup.procs && shift 2 && exec \"$@\"";

fn start_unit(world: &MigrationGroup) -> Result<CountingProgram> {
    let enter = [
        "sh",
        "-c",
        ENTER_CGROUP,
        CGROUP,
        CGROUP_LIMIT.0,
        CGROUP_LIMIT.1,
    ];
    world.start_through(DONOR, &enter)
}

/// Moves a unit twice; its control group moves each time, and is left at no other node.
pub fn cgroup_moves(world: &MigrationGroup) -> Result<()> {
    let counter = start_unit(world)?;
    for (from, to) in [(DONOR, ACCEPTOR), (ACCEPTOR, HOLDER)] {
        let pid = unit_entry(world, from)?.pid;
        ensure!(
            pid == world.pid_on(from, &counter)?,
            "{pid} is not the process of the unit"
        );
        world.move_to(pid, from, to)?;
        world.assert_goes_on(&counter, to)?;
        let unit_at_acceptor = unit_entry(world, to)?;
        ensure!(
            unit_at_acceptor.group == "system.slice/game.service",
            "{unit_at_acceptor:?}"
        );
        ensure!(
            unit_at_acceptor.pid == world.pid_on(to, &counter)?,
            "{unit_at_acceptor:?}"
        );
        ensure!(read_cgroup_file(world, to, CGROUP_LIMIT.0)?.as_deref() == Some(CGROUP_LIMIT.1));
        if from != DONOR {
            wait_until_cgroup_removed(world, from)?;
        }
    }
    world.end(&counter)?;
    wait_until_cgroup_removed(world, HOLDER)
}

/// If the unit already runs at the acceptor, its group there is not touched. If the acceptor's daemon dies, no group is
/// left there.
pub fn cgroup_stays(world: &MigrationGroup) -> Result<()> {
    let counter = start_unit(world)?;
    let other = world.start_through(
        ACCEPTOR,
        &["sh", "-c", ENTER_CGROUP, CGROUP, CGROUP_LIMIT.0, "7"],
    )?;
    let pid = unit_entry(world, DONOR)?.pid;
    let status = world.wait_for_migration(DONOR, world.begin(pid, DONOR, ACCEPTOR)?)?;
    let MigrationOutcome::Kept { reason, .. } = &status.outcome else {
        anyhow::bail!("the process moved: {status:?}");
    };
    ensure!(
        reason.contains("system.slice/game.service has processes"),
        "{reason}"
    );
    ensure!(read_cgroup_file(world, ACCEPTOR, CGROUP_LIMIT.0)?.as_deref() == Some("7"));
    world.end(&other)?;

    let file = world.cluster.run_path(ACCEPTOR, "fault")?;
    let starts = world.cluster.daemon_starts(ACCEPTOR);
    std::fs::write(&file, "move-restore before die")?;
    world.begin(pid, DONOR, ACCEPTOR)?;
    world.wait("the daemon did not die", || {
        Ok(world.cluster.daemon_starts(ACCEPTOR) > starts)
    })?;
    world.cluster.wait_ready()?;
    world.wait("records of the move are left in a run directory", || {
        no_move_records_left(world)
    })?;
    wait_until_cgroup_removed(world, ACCEPTOR)?;
    world.assert_goes_on(&counter, DONOR)?;
    world.end(&counter)
}

fn unit_entry(world: &MigrationGroup, node: &str) -> Result<UnitEntry> {
    let control = world.cluster.blocking_control_client(node)?;
    let unit = control.run(async |client| client.unit(UNIT).await);
    unit.with_context(|| format!("{UNIT} on {node}"))
}

/// Returns the content of a file of the group on a host; none if the host has no such group.
fn read_cgroup_file(world: &MigrationGroup, node: &str, file: &str) -> Result<Option<String>> {
    let mut cat = world.cluster.lab().command(node)?;
    let output = cat.args(["cat", &format!("{CGROUP}/{file}")]).output()?;
    let text = String::from_utf8(output.stdout)?;
    Ok(output.status.success().then(|| text.trim().to_owned()))
}

/// Waits until the host has no such group.
fn wait_until_cgroup_removed(world: &MigrationGroup, node: &str) -> Result<()> {
    world
        .wait("the cgroup of the unit is left", || {
            Ok(read_cgroup_file(world, node, CGROUP_LIMIT.0)?.is_none())
        })
        .with_context(|| format!("on {node}"))
}
