//! Obstacles at the acceptor: the move is refused with a reason, the process and its clients go on where they are, and
//! the next move without the obstacle succeeds.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MigrationOutcome;
use holdfast_bench::cluster::Family;
use holdfast_bench::load::Load;

use crate::clients::{CLIENTS, all_go_on, connected, pid, serving_by};
use crate::common::PORT;
use crate::faults::{ACCEPTOR, DONOR};
use crate::numbered::Datagrams;
use crate::world::{World, compile};

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
    put: String,
    remove: String,
    /// Parts of the expected reason.
    says: Vec<&'a str>,
}

fn over(what: &Path, mount: &str, says: &'static str) -> Obstacle<'static> {
    let what = what.display();
    Obstacle {
        put: format!("mount {mount} {what}"),
        remove: format!("umount {what}"),
        says: vec![says],
    }
}

/// A server with clients, and the means to check all of them.
struct Served<'a> {
    world: &'a World,
    folder: &'a tempfile::TempDir,
    connections: Load,
    datagrams: Datagrams,
}

/// Tries all obstacles, one after the other.
pub fn refused(name: &str) -> Result<()> {
    let place = tempfile::tempdir()?;
    let path = |name: &str| place.path().join(name);
    for directory in ["library", "files", "other"] {
        std::fs::create_dir(path(directory))?;
    }
    let library = path("library/one.so");
    build(&library, 1)?;
    build(&path("other/one.so"), 2)?;
    let file = path("files/gone");
    std::fs::write(&file, vec![7; FILE_KIB as usize * 1024])?;
    let how = format!("<>{0}", file.display());
    let by = format!("LD_PRELOAD={}", library.display());
    let (world, folder) = serving_by(name, Family::V4, (&by, &how))?;
    std::fs::remove_file(&file)?;

    let program = compile("echo")?;
    let served = Served {
        world: &world,
        folder: &folder,
        connections: connected(&world, CLIENTS)?,
        datagrams: Datagrams::start(&world.cluster, Family::V4, CLIENTS),
    };
    served.goes_on()?;
    let beside = program.parent().context("a directory")?;
    let other = format!("--bind {}", path("other/one.so").display());
    let tiny = format!("-t tmpfs -o size={}k tmpfs", FILE_KIB / 4);
    let obstacles = [
        over(
            &program,
            "--bind /bin/true",
            "differs from the donor's file",
        ),
        over(beside, "-t tmpfs tmpfs", "No such file"),
        over(&library, &other, "one.so: differs from the donor's file"),
        over(&path("library"), "-t tmpfs tmpfs", "one.so: No such file"),
        over(&path("files"), &tiny, "files/gone: No space left on device"),
        full_run_directory(),
        no_memory(&world)?,
        port_taken(&world, "SOCK_STREAM"),
        port_taken(&world, "SOCK_DGRAM"),
    ];
    for obstacle in obstacles {
        served
            .refuses(&obstacle)
            .with_context(|| obstacle.put.clone())?;
    }
    served.restorer_killed()?.moves_in_the_end()
}

impl Served<'_> {
    fn goes_on(&self) -> Result<()> {
        all_go_on(self.world, &self.connections)?;
        self.datagrams.all_answered_again();
        Ok(())
    }

    fn run(&self, script: &str) -> Result<String> {
        let mut command = self.world.cluster.lab().command(ACCEPTOR)?;
        let output = command.args(["sh", "-c", script]).output()?;
        ensure!(output.status.success(), "`{script}`: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn refuses(&self, obstacle: &Obstacle<'_>) -> Result<()> {
        self.run(&obstacle.put)?;
        let pid = pid(self.folder)?;
        let check = self.world.check_to(pid, DONOR, ACCEPTOR)?;
        ensure!(!check.movable && check.blockers.is_empty(), "{check:?}");
        let id = self.world.begin(pid, DONOR, ACCEPTOR)?;
        let reason = self.kept(id, &obstacle.says)?;
        let said = format!("node 3 refused: {}", check.refusals.join("; "));
        ensure!(unnumbered(&reason) == unnumbered(&said), "{said}, {reason}");
        self.run(&obstacle.remove)?;
        Ok(())
    }

    /// Asserts that the process stays for this reason, and that nothing of the move is left.
    fn kept(&self, id: u64, says: &[&str]) -> Result<String> {
        let status = self.world.ended(DONOR, id)?;
        let MigrationOutcome::Kept { reason } = &status.outcome else {
            anyhow::bail!("it came: {status:?}");
        };
        eprintln!("{reason}");
        let missing = says.iter().find(|part| !reason.contains(**part));
        ensure!(missing.is_none(), "no {missing:?} in: {reason}");
        self.goes_on()?;
        let world = self.world;
        world.nothing_is_left(ACCEPTOR, "echo")?;
        ensure!(world.runs(DONOR, "echo")? == 1, "it is not where it was");
        world.nothing_is_in_transit()?;
        Ok(reason.clone())
    }

    /// Kills the restorer, as the kernel does when it is out of memory. Only datagrams that have reached the acceptor
    /// by then are lost.
    fn restorer_killed(mut self) -> Result<Self> {
        let world = self.world;
        let begin = || Datagrams::start(&world.cluster, Family::V4, CLIENTS);
        let before = std::mem::replace(&mut self.datagrams, begin());
        none_lost(before)?;
        let file = self.world.cluster.run_file(DONOR, "fault")?;
        std::fs::write(&file, "move-freeze before pause 600")?;
        let id = self.world.begin(pid(self.folder)?, DONOR, ACCEPTOR)?;
        self.world
            .wait("it did not come so far", || Ok(!file.exists()))?;
        let restorers = self.world.restorers(ACCEPTOR)?;
        ensure!(restorers.len() == 1, "{restorers:?}");
        let killed = std::process::Command::new("kill")
            .args(["-9", &restorers[0].to_string()])
            .status()?;
        ensure!(killed.success(), "it was not killed");
        self.kept(id, &["its restorer was killed", "memory"])?;
        std::mem::replace(&mut self.datagrams, begin()).end("restorer killed");
        Ok(self)
    }

    /// A process of the acceptor's host has the same PID, which is no obstacle: the server keeps its PID in a namespace
    /// of its own.
    fn moves_in_the_end(self) -> Result<()> {
        let pid = pid(self.folder)?;
        let other = format!(
            "for try in $(seq 1000); do echo $(({pid} - 1)) >/proc/sys/kernel/ns_last_pid; \
             sleep 1000 </dev/null >/dev/null 2>&1 & \
             [ $! = {pid} ] && exit 0; kill $!; done; exit 1"
        );
        self.run(&other)?;
        self.world.move_to(pid, DONOR, ACCEPTOR)?;
        self.goes_on()?;
        let residents = self.world.residents(ACCEPTOR)?;
        ensure!(residents.len() == 1, "{residents:?}");
        let outside = residents[0].pid;
        let inside = self.run(&format!(
            "awk '/^NSpid/ {{ print $NF }}' /proc/{outside}/status"
        ))?;
        ensure!(inside == pid.to_string(), "it has PID {inside}, not {pid}");
        self.run(&format!(
            "[ $(cat /proc/{pid}/comm) = sleep ] && kill {pid}"
        ))?;
        none_lost(self.datagrams)?;
        self.connections.stop()
    }
}

/// Returns a reason without the name of the move's record, which contains a different number for each move.
fn unnumbered(reason: &str) -> Vec<&str> {
    let words = reason.split(' ');
    words.filter(|word| !word.contains(".takes")).collect()
}

fn none_lost(datagrams: Datagrams) -> Result<()> {
    let counts = datagrams.end("obstacles");
    ensure!(counts.lost.is_empty(), "{counts:?}");
    Ok(())
}

fn build(library: &Path, version: u32) -> Result<()> {
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
fn port_taken(world: &World, kind: &str) -> Obstacle<'static> {
    let address = world.cluster.service_address(Family::V4);
    let program = format!(
        "import os, socket, time\n\
         one = socket.socket(socket.AF_INET, socket.{kind})\n\
         one.bind((\"{address}\", {PORT}))\n\
         if one.type == socket.SOCK_STREAM: one.listen()\n\
         print(os.getpid(), file=open(\"/run/rival\", \"w\"), flush=True)\n\
         time.sleep(600)\n"
    );
    Obstacle {
        put: format!(
            "python3 -c '{program}' </dev/null >/dev/null 2>&1 & \
             for try in $(seq 6000); do [ -s /run/rival ] && exit 0; sleep 0.01; done; exit 1"
        ),
        remove: "rival=$(cat /run/rival); kill $rival; rm /run/rival; \
                 while grep -qs '^State:.[^Z]' /proc/$rival/status; do sleep 0.01; done"
            .into(),
        says: vec!["is in use there"],
    }
}

fn full_run_directory() -> Obstacle<'static> {
    Obstacle {
        put:
            "mount -o remount,size=64k /run; dd if=/dev/zero of=/run/full bs=4k 2>/dev/null; exit 0"
                .into(),
        remove: "rm /run/full && mount -o remount,size=100m /run".into(),
        says: vec!["No space left on device", "free space in the run directory"],
    }
}

/// Limits processes that the daemon starts to less address space than the server uses.
fn no_memory(world: &World) -> Result<Obstacle<'static>> {
    let daemon = world.cluster.daemon_pid(ACCEPTOR)?.context("no daemon")?;
    let status = std::fs::read_to_string(format!("/proc/{daemon}/status"))?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let size = size.and_then(|text| text.split_whitespace().next());
    let size: u64 = size.context("no size")?.parse()?;
    let limit = size * 1024 + SPARE_BYTES;
    ensure!(limit < EMPTY_BYTES, "the daemon has {size} KiB");
    let inside = "$(pidof -s holdfastd)";
    Ok(Obstacle {
        put: format!("prlimit --pid {inside} --as={limit}:"),
        remove: format!("prlimit --pid {inside} --as=unlimited:"),
        says: vec!["Cannot allocate memory"],
    })
}
