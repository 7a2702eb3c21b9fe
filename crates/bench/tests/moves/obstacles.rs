//! Obstacles at the acceptor: the move is refused with a reason, the process and its clients go on where they are, and
//! the next move without the obstacle succeeds.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MigrationOutcome;
use holdfast_testbed::cluster::IpFamily;
use holdfast_testbed::connection_load::ConnectionLoad;

use crate::client_traffic::{
    CLIENTS, assert_all_go_on, connect_clients, read_pid, start_group_with_shell,
};
use crate::common::PORT;
use crate::faults::{ACCEPTOR, DONOR};
use crate::numbered_datagrams::DatagramLoad;
use crate::world::{MigrationGroup, compile_program};

/// Address space in bytes that the server reserves and never touches.
const EMPTY_BYTES: u64 = 4 << 30;
/// Address space in bytes that the acceptor's restorer has left.
const SPARE_BYTES: u64 = 1 << 30;
/// Size in KiB of an unnamed file of the server.
const FILE_KIB: u32 = 512;

/// Source of a library that the server is started with; two versions of it have the same size.
const LIBRARY: &str = "#include <sys/mman.h>\n\
    int version = VERSION;\n\
    __attribute__((constructor)) static void begin(void) {\n\
        mmap(0, EMPTY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);\n\
    }\n";

/// An obstacle that a shell command creates, and another removes.
struct Obstacle<'a> {
    create: String,
    remove: String,
    /// Parts of the expected reason.
    reason_parts: Vec<&'a str>,
}

fn mount_over(path: &Path, mount: &str, reason_part: &'static str) -> Obstacle<'static> {
    let what = path.display();
    Obstacle {
        create: format!("mount {mount} {what}"),
        remove: format!("umount {what}"),
        reason_parts: vec![reason_part],
    }
}

/// A server with clients, and the means to check all of them.
struct ServerWithClients<'a> {
    world: &'a MigrationGroup,
    folder: &'a tempfile::TempDir,
    connections: ConnectionLoad,
    datagrams: DatagramLoad,
}

/// Tries all obstacles, one after the other.
pub fn refuse_each_obstacle(name: &str) -> Result<()> {
    let folder_guard = tempfile::tempdir()?;
    let path = |name: &str| folder_guard.path().join(name);
    for directory in ["library", "files", "other"] {
        std::fs::create_dir(path(directory))?;
    }
    let library = path("library/one.so");
    build_library(&library, 1)?;
    build_library(&path("other/one.so"), 2)?;
    let file = path("files/gone");
    std::fs::write(&file, vec![7; FILE_KIB as usize * 1024])?;
    let redirections = format!("<>{0}", file.display());
    let environment = format!("LD_PRELOAD={}", library.display());
    let (world, folder) =
        start_group_with_shell(name, IpFamily::V4, (&environment, &redirections))?;
    std::fs::remove_file(&file)?;

    let program = compile_program("echo")?;
    let server = ServerWithClients {
        world: &world,
        folder: &folder,
        connections: connect_clients(&world, CLIENTS)?,
        datagrams: DatagramLoad::start(&world.cluster, IpFamily::V4, CLIENTS),
    };
    server.assert_clients_go_on()?;
    let program_folder = program.parent().context("a directory")?;
    let library_mount = format!("--bind {}", path("other/one.so").display());
    let tiny = format!("-t tmpfs -o size={}k tmpfs", FILE_KIB / 4);
    let obstacles = [
        mount_over(
            &program,
            "--bind /bin/true",
            "differs from the donor's file",
        ),
        mount_over(program_folder, "-t tmpfs tmpfs", "No such file"),
        mount_over(
            &library,
            &library_mount,
            "one.so: differs from the donor's file",
        ),
        mount_over(&path("library"), "-t tmpfs tmpfs", "one.so: No such file"),
        mount_over(&path("files"), &tiny, "files/gone: No space left on device"),
        full_run_directory(),
        address_space_limit(&world)?,
        occupied_port(&world, "SOCK_STREAM"),
        occupied_port(&world, "SOCK_DGRAM"),
    ];
    for obstacle in obstacles {
        server
            .assert_refused(&obstacle)
            .with_context(|| obstacle.create.clone())?;
    }
    server.kill_restorer()?.assert_moves_with_same_pid()
}

impl ServerWithClients<'_> {
    fn assert_clients_go_on(&self) -> Result<()> {
        assert_all_go_on(self.world, &self.connections)?;
        self.datagrams.wait_until_all_answered();
        Ok(())
    }

    fn run(&self, script: &str) -> Result<String> {
        let mut command = self.world.cluster.lab().command(ACCEPTOR)?;
        let output = command.args(["sh", "-c", script]).output()?;
        ensure!(output.status.success(), "`{script}`: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn assert_refused(&self, obstacle: &Obstacle<'_>) -> Result<()> {
        self.run(&obstacle.create)?;
        let pid = read_pid(self.folder)?;
        let check = self.world.check_to(pid, DONOR, ACCEPTOR)?;
        ensure!(!check.movable && check.blockers.is_empty(), "{check:?}");
        let id = self.world.begin(pid, DONOR, ACCEPTOR)?;
        let reason = self.assert_kept(id, &obstacle.reason_parts)?;
        let expected_error = format!("node 3 refused: {}", check.refusals.join("; "));
        ensure!(
            without_record_name(&reason) == without_record_name(&expected_error),
            "{expected_error}, {reason}"
        );
        self.run(&obstacle.remove)?;
        Ok(())
    }

    /// Asserts that the process stays for this reason, and that nothing of the move is left.
    fn assert_kept(&self, id: u64, reason_parts: &[&str]) -> Result<String> {
        let status = self.world.wait_for_migration(DONOR, id)?;
        let MigrationOutcome::Kept { reason, .. } = &status.outcome else {
            anyhow::bail!("the process moved to the acceptor: {status:?}");
        };
        eprintln!("{reason}");
        let missing = reason_parts.iter().find(|part| !reason.contains(**part));
        ensure!(missing.is_none(), "no {missing:?} in: {reason}");
        self.assert_clients_go_on()?;
        let world = self.world;
        world.wait_until_clean(ACCEPTOR, "echo")?;
        ensure!(
            world.count_processes(DONOR, "echo")? == 1,
            "the process is not at the donor"
        );
        world.wait_until_no_transit()?;
        Ok(reason.clone())
    }

    /// Kills the restorer, as the kernel does when it is out of memory. Only datagrams that have reached the acceptor
    /// by then are lost.
    fn kill_restorer(mut self) -> Result<Self> {
        let world = self.world;
        let begin = || DatagramLoad::start(&world.cluster, IpFamily::V4, CLIENTS);
        let before = std::mem::replace(&mut self.datagrams, begin());
        assert_none_lost(before)?;
        let file = self.world.cluster.run_path(DONOR, "fault")?;
        std::fs::write(&file, "move-freeze before pause 600")?;
        let id = self.world.begin(read_pid(self.folder)?, DONOR, ACCEPTOR)?;
        self.world
            .wait("the move did not reach the fault point", || {
                Ok(!file.exists())
            })?;
        let restorers = self.world.restorers(ACCEPTOR)?;
        ensure!(restorers.len() == 1, "{restorers:?}");
        let killed = std::process::Command::new("kill")
            .args(["-9", &restorers[0].to_string()])
            .status()?;
        ensure!(killed.success(), "the restorer was not killed");
        self.assert_kept(id, &["its restorer was killed", "memory"])?;
        std::mem::replace(&mut self.datagrams, begin()).finish("restorer killed");
        Ok(self)
    }

    /// A process of the acceptor's host has the same PID, which is no obstacle: the server keeps its PID in a namespace
    /// of its own.
    fn assert_moves_with_same_pid(self) -> Result<()> {
        let pid = read_pid(self.folder)?;
        let pid_occupier = format!(
            "for try in $(seq 1000); do echo $(({pid} - 1)) >/proc/sys/kernel/ns_last_pid; \
             sleep 1000 </dev/null >/dev/null 2>&1 & \
             [ $! = {pid} ] && exit 0; kill $!; done; exit 1"
        );
        self.run(&pid_occupier)?;
        self.world.move_to(pid, DONOR, ACCEPTOR)?;
        self.assert_clients_go_on()?;
        let residents = self.world.residents(ACCEPTOR)?;
        ensure!(residents.len() == 1, "{residents:?}");
        let host_pid = residents[0].pid;
        let namespace_pid = self.run(&format!(
            "awk '/^NSpid/ {{ print $NF }}' /proc/{host_pid}/status"
        ))?;
        ensure!(
            namespace_pid == pid.to_string(),
            "the process has PID {namespace_pid}, not {pid}"
        );
        self.run(&format!(
            "[ $(cat /proc/{pid}/comm) = sleep ] && kill {pid}"
        ))?;
        assert_none_lost(self.datagrams)?;
        self.connections.stop()
    }
}

/// Returns a reason without the name of the move's record, which contains a different number for each move.
fn without_record_name(reason: &str) -> Vec<&str> {
    let words = reason.split(' ');
    words.filter(|word| !word.contains(".takes")).collect()
}

fn assert_none_lost(datagrams: DatagramLoad) -> Result<()> {
    let counts = datagrams.finish("obstacles");
    ensure!(counts.lost.is_empty(), "{counts:?}");
    Ok(())
}

fn build_library(library: &Path, version: u32) -> Result<()> {
    let source = library.with_extension("c");
    std::fs::write(&source, LIBRARY)?;
    let status = std::process::Command::new("gcc")
        .args(["-shared", "-fPIC", "-Wl,--build-id"])
        .args([
            format!("-DVERSION={version}"),
            format!("-DEMPTY={EMPTY_BYTES}UL"),
        ])
        .arg("-o")
        .args([library, &source])
        .status()
        .context("gcc")?;
    ensure!(status.success(), "the library does not compile");
    Ok(())
}

/// Another program is bound to the server's port.
fn occupied_port(world: &MigrationGroup, kind: &str) -> Obstacle<'static> {
    let address = world.cluster.service_address(IpFamily::V4);
    let program = format!(
        "import os, socket, time\n\
         one = socket.socket(socket.AF_INET, socket.{kind})\n\
         one.bind((\"{address}\", {PORT}))\n\
         if one.type == socket.SOCK_STREAM: one.listen()\n\
         print(os.getpid(), file=open(\"/run/rival\", \"w\"), flush=True)\n\
         time.sleep(600)\n"
    );
    Obstacle {
        create: format!(
            "python3 -c '{program}' </dev/null >/dev/null 2>&1 & \
             for try in $(seq 6000); do [ -s /run/rival ] && exit 0; sleep 0.01; done; exit 1"
        ),
        remove: "rival=$(cat /run/rival); kill $rival; rm /run/rival; \
                 while grep -qs '^State:.[^Z]' /proc/$rival/status; do sleep 0.01; done"
            .into(),
        reason_parts: vec!["is in use at the acceptor"],
    }
}

fn full_run_directory() -> Obstacle<'static> {
    Obstacle {
        create:
            "mount -o remount,size=64k /run; dd if=/dev/zero of=/run/full bs=4k 2>/dev/null; exit 0"
                .into(),
        remove: "rm /run/full && mount -o remount,size=100m /run".into(),
        reason_parts: vec!["No space left on device", "free space in the run directory"],
    }
}

/// Limits processes that the daemon starts to less address space than the server uses.
fn address_space_limit(world: &MigrationGroup) -> Result<Obstacle<'static>> {
    let daemon = world.cluster.daemon_pid(ACCEPTOR)?.context("no daemon")?;
    let status = std::fs::read_to_string(format!("/proc/{daemon}/status"))?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let size = size.and_then(|text| text.split_whitespace().next());
    let size: u64 = size.context("no size")?.parse()?;
    let limit = size * 1024 + SPARE_BYTES;
    ensure!(limit < EMPTY_BYTES, "the daemon has {size} KiB");
    let daemon_pid = "$(pidof -s holdfastd)";
    Ok(Obstacle {
        create: format!("prlimit --pid {daemon_pid} --as={limit}:"),
        remove: format!("prlimit --pid {daemon_pid} --as=unlimited:"),
        reason_parts: vec!["Cannot allocate memory"],
    })
}
