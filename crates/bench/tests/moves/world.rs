//! A group with nodes that move processes, and a program that records where it runs.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_api::control::{
    MigrationOutcome, MigrationRequest, MigrationStatus, ProcessCheck, ResidentProcess,
    SocketStrategy,
};
use holdfast_checkpoint::REAPER_NAME;
use holdfast_lab::Topology;
use holdfast_testbed::cluster::{Cluster, ClusterSpec, STALLS_MAX, is_node_stall};

use crate::faults::no_move_records_left;

/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time limit for held packets and flows in transit to disappear. The limit is below the time after which a restarted
/// daemon gives up the leftovers of its predecessor, so the leftovers must be settled by a peer's report.
const TRANSIT_END_MAX: Duration = Duration::from_secs(20);

/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Number of new counts that prove that the program goes on.
pub const NEW_COUNTS_MIN: usize = 5;

/// A running group whose nodes move processes.
pub struct MigrationGroup {
    pub cluster: Cluster,
}

/// One count, as the program wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    pub host: String,
    pub number: u64,
    pub pid: i32,
}

/// The program, on whichever node it runs.
pub struct CountingProgram {
    file: PathBuf,
    program: &'static str,
    _folder: tempfile::TempDir,
}

impl MigrationGroup {
    /// Brings a group of nodes up.
    pub fn up(name: &str) -> Result<MigrationGroup> {
        MigrationGroup::up_over(name, Topology::default())
    }

    /// Brings a group of nodes up over links of this topology.
    pub fn up_over(name: &str, topology: Topology) -> Result<MigrationGroup> {
        let mut spec = ClusterSpec::new(format!("m-{name}-{}", std::process::id()));
        spec.topology = topology;
        spec.migration = true;
        spec.daemon_environment = [("HOLDFAST_TEST_FAULTS".to_owned(), "1".to_owned())].into();
        let cluster = Cluster::up(spec)?;
        Ok(MigrationGroup { cluster })
    }

    /// Starts the program on a node, as a child of that host's first process.
    pub fn start(&self, node: &str) -> Result<CountingProgram> {
        self.start_through(node, &[])
    }

    /// Starts the program through a command that changes its identity.
    pub fn start_through(&self, node: &str, wrapper: &[&str]) -> Result<CountingProgram> {
        self.start_program(node, wrapper, "counter", &[])
    }

    /// Starts another counting program, with further arguments.
    pub fn start_program(
        &self,
        node: &str,
        wrapper: &[&str],
        program: &'static str,
        arguments: &[&str],
    ) -> Result<CountingProgram> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("counts");
        let mut command = self.cluster.lab().command(node)?;
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777))?;
        let in_background = "setsid \"$@\" </dev/null >/dev/null 2>&1 &";
        command
            .args(["sh", "-c", in_background, "sh"])
            .args(wrapper)
            .arg(compile_program(program)?)
            .arg(&file)
            .args(arguments);
        let status = command.stdin(Stdio::null()).status()?;
        ensure!(status.success(), "the program was not started: {status}");
        let counter = CountingProgram {
            file,
            program,
            _folder: folder,
        };
        self.wait("the program does not count", || {
            Ok(!counter.counts()?.is_empty())
        })?;
        Ok(counter)
    }

    /// Returns the program's PID on this node: the PID of the resident, or of the process that was started there.
    pub fn pid_on(&self, node: &str, counter: &CountingProgram) -> Result<i32> {
        match self.residents(node)?.as_slice() {
            [] => Ok(counter.last_count()?.pid),
            [resident] => Ok(resident.pid),
            more => bail!("{} processes came to {node}", more.len()),
        }
    }

    pub fn residents(&self, node: &str) -> Result<Vec<ResidentProcess>> {
        let control = self.cluster.blocking_control_client(node)?;
        Ok(control.run(async |client| client.status().await)?.residents)
    }

    /// Requests a migration, and returns its number.
    pub fn begin(&self, pid: i32, from: &str, to: &str) -> Result<u64> {
        self.begin_with_sockets(pid, from, to, SocketStrategy::default())
    }

    /// Requests a migration in one of the three socket transfer modes.
    pub fn begin_with_sockets(
        &self,
        pid: i32,
        from: &str,
        to: &str,
        sockets: SocketStrategy,
    ) -> Result<u64> {
        self.request_migration(pid, from, to, sockets, [false; 3])
    }

    /// Requests a copy, and returns its number.
    pub fn begin_copy(&self, pid: i32, from: &str, to: &str) -> Result<u64> {
        self.request_migration(
            pid,
            from,
            to,
            SocketStrategy::default(),
            [true, false, false],
        )
    }

    /// Requests a post-copy migration, and returns its number.
    pub fn begin_post_copy(&self, pid: i32, from: &str, to: &str) -> Result<u64> {
        self.request_migration(
            pid,
            from,
            to,
            SocketStrategy::default(),
            [false, false, true],
        )
    }

    pub fn request_migration(
        &self,
        pid: i32,
        from: &str,
        to: &str,
        sockets: SocketStrategy,
        [clone, verify, post_copy]: [bool; 3],
    ) -> Result<u64> {
        let control = self.cluster.blocking_control_client(from)?;
        let request = MigrationRequest {
            pid,
            to: to.to_owned(),
            sockets,
            clone,
            // No freeze is as short as 1 µs, so post-copy always happens.
            max_freeze_us: post_copy.then_some(1),
            post_copy,
            verify,
        };
        let accepted = control.run(async |client| client.migrate(&request).await)?;
        Ok(accepted.id)
    }

    /// Checks a process on its node and at the acceptor that it is to move to.
    pub fn check_to(&self, pid: i32, from: &str, to: &str) -> Result<ProcessCheck> {
        let control = self.cluster.blocking_control_client(from)?;
        Ok(control.run(async |client| client.check_to(pid, to).await)?)
    }

    /// Waits for the end of a migration, and returns its status.
    pub fn wait_for_migration(&self, from: &str, id: u64) -> Result<MigrationStatus> {
        let control = self.cluster.blocking_control_client(from)?;
        let mut last = None;
        self.wait("the migration does not end", || {
            let status = control.run(async |client| client.migration(id).await)?;
            let ended = status.outcome != MigrationOutcome::Running;
            last = Some(status);
            Ok(ended)
        })?;
        last.context("no status")
    }

    /// Moves the program, and asserts that the move succeeds and the program goes on unchanged.
    pub fn migrate_counter(
        &self,
        counter: &CountingProgram,
        from: &str,
        to: &str,
    ) -> Result<MigrationStatus> {
        let pid = self.pid_on(from, counter)?;
        let begin = || {
            self.request_migration(
                pid,
                from,
                to,
                SocketStrategy::default(),
                [false, true, false],
            )
        };
        let status = self.migrate_with_retry(from, to, begin)?;
        self.assert_goes_on(counter, to)?;
        Ok(status)
    }

    /// Moves a process in the default socket transfer mode, with retries.
    pub fn move_to(&self, pid: i32, from: &str, to: &str) -> Result<MigrationStatus> {
        self.move_with_sockets(pid, from, to, SocketStrategy::default())
    }

    /// Moves a process in one of the three socket transfer modes.
    pub fn move_with_sockets(
        &self,
        pid: i32,
        from: &str,
        to: &str,
        sockets: SocketStrategy,
    ) -> Result<MigrationStatus> {
        self.migrate_with_retry(from, to, || self.begin_with_sockets(pid, from, to, sockets))
    }

    pub fn migrate_with_retry(
        &self,
        from: &str,
        to: &str,
        begin: impl Fn() -> Result<u64>,
    ) -> Result<MigrationStatus> {
        for retry in 0.. {
            let status = self.wait_for_migration(from, begin()?)?;
            match &status.outcome {
                MigrationOutcome::Moved => return Ok(status),
                MigrationOutcome::Kept { reason, .. }
                    if is_node_stall(reason) && retry < STALLS_MAX => {}
                other => bail!("from {from} to {to}: {other:?}"),
            }
        }
        unreachable!()
    }

    /// Waits until the program has counted some more on this node, and checks everything that it wrote.
    pub fn assert_goes_on(&self, counter: &CountingProgram, node: &str) -> Result<()> {
        let before = counter.counts()?.len();
        self.wait("the program does not continue", || {
            let counts = counter.counts()?;
            let new = counts.iter().skip(before);
            Ok(new.filter(|count| count.host == node).count() >= NEW_COUNTS_MIN)
        })
        .with_context(|| format!("on {node}; last {:?}", counter.last_count()))?;
        counter.assert_in_order()
    }

    /// Ends the program, and waits until it is at no node.
    pub fn end(&self, counter: &CountingProgram) -> Result<()> {
        std::fs::write(counter.end_file(), "")?;
        self.wait("the program does not end", || {
            for node in self.cluster.nodes() {
                if !self.residents(&node)?.is_empty()
                    || self.count_processes(&node, counter.program)? > 0
                {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    /// Counts the program's processes on a node, including stopped ones and the stub processes of a restore.
    pub fn count_running(&self, node: &str) -> Result<usize> {
        self.count_processes(node, "counter")
    }

    /// Counts the processes of another program.
    pub fn count_processes(&self, node: &str, program: &str) -> Result<usize> {
        let program = compile_program(program)?;
        let is_program = |pid: &i32| {
            std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program)
        };
        let processes = self.cluster.lab().processes(node)?;
        Ok(processes.into_iter().filter(is_program).count())
    }

    /// Returns the restorers of a node, by their PIDs in the test's namespace.
    pub fn restorers(&self, node: &str) -> Result<Vec<i32>> {
        let mut found = self.cluster.lab().processes(node)?;
        found.retain(|pid| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let status_field = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
            // A process that the restorer makes has the restorer's name at first, but is not the first of its PID
            // namespace.
            let is_first = status_field("NSpid:").is_some_and(|pids| pids.ends_with("\t1"));
            is_first && status_field("Name:\t") == Some(REAPER_NAME)
        });
        Ok(found)
    }

    /// Waits until nothing is left of a program or of its move, on a node that it did not move to.
    pub fn wait_until_clean(&self, node: &str, program: &str) -> Result<()> {
        self.wait("records of the move are left in a run directory", || {
            no_move_records_left(self)
        })?;
        self.wait("processes of the program are left", || {
            Ok(self.count_processes(node, program)? == 0)
        })?;
        self.wait("a restorer process is left", || {
            Ok(self.restorers(node)?.is_empty())
        })
    }

    /// Waits until no node holds packets or has a flow in transit.
    pub fn wait_until_no_transit(&self) -> Result<()> {
        for node in self.cluster.nodes() {
            let control = self.cluster.blocking_control_client(&node)?;
            let busy = |line: &&str| {
                line.starts_with("holdfast_hold_slots ")
                    || line.starts_with("holdfast_flows_in_transit{")
            };
            let mut last = String::new();
            self.wait_for(
                TRANSIT_END_MAX,
                "packets are held or flows are in transit",
                || {
                    last = control.run(async |client| client.metrics().await)?;
                    Ok(last.lines().filter(busy).all(|line| line.ends_with(" 0")))
                },
            )
            .with_context(|| last.lines().filter(busy).collect::<Vec<_>>().join("; "))
            .with_context(|| node.clone())?;
        }
        Ok(())
    }

    /// Waits for a condition.
    pub fn wait(&self, else_what: &str, condition: impl FnMut() -> Result<bool>) -> Result<()> {
        self.wait_for(PATIENCE, else_what, condition)
    }

    fn wait_for(
        &self,
        limit: Duration,
        else_what: &str,
        mut condition: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let began = Instant::now();
        while !condition()? {
            ensure!(began.elapsed() < limit, "exceeded time: {else_what}");
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

impl CountingProgram {
    /// Returns all counts written so far; an error if the program has failed and wrote a reason.
    pub fn counts(&self) -> Result<Vec<Count>> {
        if let Ok(failure) = std::fs::read_to_string(self.end_file().with_extension("failed")) {
            bail!("the program says: {}", failure.trim_end());
        }
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        let complete_lines = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        complete_lines.lines().map(parse).collect()
    }

    /// Returns the path of the file that ends the program by its existence.
    pub fn end_file(&self) -> PathBuf {
        let mut name = self.file.clone().into_os_string();
        name.push(".end");
        name.into()
    }

    /// Returns the program's name.
    pub fn program_name(&self) -> &'static str {
        self.program
    }

    pub fn last_count(&self) -> Result<Count> {
        self.counts()?.pop().context("the program wrote no count")
    }

    /// Checks that each number occurs once and in order, under one PID: the program ran at one node at a time, and lost
    /// nothing.
    pub fn assert_in_order(&self) -> Result<()> {
        let counts = self.counts()?;
        for (expected, count) in (1..).zip(&counts) {
            ensure!(
                count.number == expected && count.pid == counts[0].pid,
                "expected count {expected}, got {count:?}"
            );
        }
        Ok(())
    }
}

fn parse(line: &str) -> Result<Count> {
    let words: Vec<&str> = line.split(' ').collect();
    let [host, number, pid] = words[..] else {
        bail!("`{line}` is no count");
    };
    Ok(Count {
        host: host.to_owned(),
        number: number.parse()?,
        pid: pid.parse()?,
    })
}

/// Compiles a program of this folder, once per test run.
pub fn compile_program(name: &str) -> Result<PathBuf> {
    static COMPILED: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = compiled.get(name) {
        return Ok(program.clone());
    }
    let program =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    // A file of an earlier run with this PID may have another source.
    let _ = std::fs::remove_file(&program);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/moves");
    let status = std::process::Command::new("gcc")
        .args(["-O1", "-Wall", "-pthread", "-o"])
        .arg(&program)
        .arg(sources.join(name).with_extension("c"))
        .status()
        .context("gcc")?;
    ensure!(status.success(), "{name}.c does not compile");
    compiled.insert(name.to_owned(), program.clone());
    Ok(program)
}
