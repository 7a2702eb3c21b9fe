//! The acceptor's policy: an acceptor decides which users' processes it accepts, and which resources they may have.

use std::fs::Permissions;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use holdfast_api::control::MigrationOutcome;
use holdfast_testbed::cluster::{Cluster, ClusterSpec, IpFamily};
use toml::Value;

use crate::world::{CountingProgram, MigrationGroup};

/// User and group ID of nobody.
const NOBODY: i64 = 65534;

/// Shell text that runs the words after it as nobody: in the directory given first, with standard input from a
/// file that nobody cannot open.
const AS_NOBODY: &str = "cd \"$0\" && file=$1 && shift && \
    exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\" <\"$file\"";

/// A group with users = [0] refuses a process of nobody.
pub fn refuse_unlisted_user(world: &MigrationGroup) -> Result<()> {
    let counter = start_as_nobody(world, Path::new("/tmp"), Path::new("/dev/null"))?;
    assert_refused(world, &counter, "user 65534")
}

/// A policy that admits nobody's processes admits descriptors that nobody could not open, if the file is in a listed
/// directory.
pub fn admit_only_listed_files() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [listed, other] = ["listed", "other"].map(|name| folder.path().join(name));
    for directory in [&listed, &other] {
        std::fs::create_dir(directory)?;
        let file = directory.join("roots");
        std::fs::write(&file, "root's")?;
        std::fs::set_permissions(&file, Permissions::from_mode(0o600))?;
        std::fs::set_permissions(directory, Permissions::from_mode(0o700))?;
    }
    let files = [&*listed, Path::new(env!("CARGO_TARGET_TMPDIR"))];
    let world = start_policy_group("files", &files, &["unix"])?;

    // A file of nobody's own, and a file in the listed directory.
    for (directory, file) in [
        ("/tmp".as_ref(), "/dev/null".into()),
        (&*listed, listed.join("roots")),
    ] {
        let counter = start_as_nobody(&world, directory, &file)?;
        world
            .migrate_counter(&counter, "n2", "n3")
            .with_context(|| format!("in {}", directory.display()))?;
        world.end(&counter)?;
    }
    for (directory, file, expected_reason) in [
        (
            Path::new("/tmp"),
            other.join("roots"),
            format!("{}: ", other.join("roots").display()),
        ),
        (
            &*other,
            "/dev/null".into(),
            "its working directory".to_owned(),
        ),
    ] {
        let counter = start_as_nobody(&world, directory, &file)?;
        assert_refused(&world, &counter, &expected_reason)?;
    }
    Ok(())
}

/// State that an ordinary user's process may not have at another node, and the command that creates it.
const PRIVILEGED_STATES: [(&[&str], &str); 7] = [
    (
        &["setpriv", "--inh-caps=+chown", "--ambient-caps=+chown"],
        "it has capabilities",
    ),
    (
        &["setpriv", "--securebits=+noroot"],
        "it has securebits 0x1",
    ),
    (&["chrt", "--fifo", "7"], "real-time priority 7"),
    (&["nice", "-n", "-20"], "a thread has nice value -"),
    (
        &["ionice", "-c", "1"],
        "the real-time class of I/O priority",
    ),
    (
        &["python3", "-c", INSTALL_SECCOMP_FILTER],
        "seccomp filters without no_new_privs",
    ),
    (
        &["python3", "-c", LISTEN_ON_LOW_PORT],
        "127.0.0.1:22: ports below",
    ),
];

/// Python code that installs a seccomp filter without no_new_privs. The filter allows everything, but another one could
/// make root's programs believe that a forbidden call has succeeded.
const INSTALL_SECCOMP_FILTER: &str = "import ctypes, os, sys\n\
    code = ctypes.create_string_buffer(bytes([6, 0, 0, 0, 0, 0, 0xff, 0x7f]))\n\
    program = (ctypes.c_uint64 * 2)(1, ctypes.addressof(code))\n\
    if ctypes.CDLL(None).syscall(317, 1, 0, program): sys.exit('seccomp')\n\
    os.execvp(sys.argv[1], sys.argv[1:])\n";

/// Python code that puts a listener in place of standard input.
const LISTEN_ON_LOW_PORT: &str = "import os, socket, sys\n\
    listener = socket.create_server(('127.0.0.1', 22))\n\
    os.dup2(listener.fileno(), 0)\n\
    os.execvp(sys.argv[1], sys.argv[1:])\n";

/// State that only root may set is refused before any process is stopped.
pub fn refuse_privileged_state() -> Result<()> {
    let files = [Path::new(env!("CARGO_TARGET_TMPDIR"))];
    let world = start_policy_group("state", &files, &["unix", "ipv4"])?;
    for (command, expected_reason) in PRIVILEGED_STATES {
        let (program, options) = command.split_first().context("a command")?;
        let as_nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
        let words = match *program {
            "setpriv" => [&["setpriv"], &as_nobody[..], options].concat(),
            _ => [command, &["setpriv"], &as_nobody].concat(),
        };
        let counter = world.start_through("n2", &[&["env", "-C", "/tmp"], &words[..]].concat())?;
        assert_refused(&world, &counter, expected_reason)
            .with_context(|| expected_reason.to_owned())?;
    }
    refuse_lower_oom_score_adj(&world)
}

/// With this setting the acceptor's kernel would kill its own processes before the migrated one. (A lower value at the
/// donor takes `CAP_SYS_RESOURCE`.)
fn refuse_lower_oom_score_adj(world: &MigrationGroup) -> Result<()> {
    const SETTING: &str = "/proc/self/oom_score_adj";
    let setting = std::fs::read_to_string(SETTING)?;
    let daemon_score: i32 = setting.trim().parse()?;
    let higher = daemon_score.max(0) + 100;
    let before = world.cluster.daemon_pid("n3")?;
    std::fs::write(SETTING, higher.to_string())?;
    world.cluster.kill_daemon("n3")?;
    let restarted = world.wait("the daemon is not restarted", || {
        let pid = world.cluster.daemon_pid("n3")?;
        Ok(pid.is_some() && pid != before)
    });
    std::fs::write(SETTING, daemon_score.to_string())?;
    restarted?;
    world.cluster.wait_ready()?;
    let counter = start_as_nobody(world, Path::new("/tmp"), Path::new("/dev/null"))?;
    let why = format!("its oom_score_adj is {daemon_score}, below this node's minimum {higher}");
    assert_refused(world, &counter, &why)
}

/// A socket of an unlisted family is refused.
pub fn refuse_unlisted_family() -> Result<()> {
    let files = [Path::new(env!("CARGO_TARGET_TMPDIR"))];
    let world = start_policy_group("family", &files, &["unix"])?;
    let address = world.cluster.address("n1", IpFamily::V4)?;
    let lab = world.cluster.lab();
    let listener = lab.run_in_net_namespace("n1", || TcpListener::bind((address, 0)))??;
    let port = listener.local_addr()?.port().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let echo = |stream: TcpStream| std::io::copy(&mut stream.try_clone()?, &mut &stream);
            std::thread::spawn(move || echo(stream));
        }
    });
    let as_nobody = ["sh", "-c", AS_NOBODY, "/tmp", "/dev/null"];
    let words = [&*address.to_string(), &port];
    let counter = world.start_program("n2", &as_nobody, "session", &words)?;
    assert_refused(&world, &counter, "a socket of family ipv4")
}

fn start_policy_group(name: &str, files: &[&Path], families: &[&str]) -> Result<MigrationGroup> {
    let mut spec = ClusterSpec::new(format!("m-{name}-{}", std::process::id()));
    spec.migration = true;
    let numbers = || Value::Array(vec![NOBODY.into()]);
    let files = files
        .iter()
        .map(|path| Value::from(path.display().to_string()));
    let families = families.iter().map(|family| Value::from(*family));
    for (key, value) in [
        ("users", numbers()),
        ("groups", numbers()),
        ("files", Value::Array(files.collect())),
        ("families", Value::Array(families.collect())),
    ] {
        spec.migration_policy.insert(key.to_owned(), value);
    }
    let cluster = Cluster::up(spec)?;
    Ok(MigrationGroup { cluster })
}

fn start_as_nobody(
    world: &MigrationGroup,
    directory: &Path,
    file: &Path,
) -> Result<CountingProgram> {
    let (directory, file) = (directory.display().to_string(), file.display().to_string());
    world.start_through("n2", &["sh", "-c", AS_NOBODY, &directory, &file])
}

/// Asserts that the process is refused for this reason, and goes on where it is.
fn assert_refused(
    world: &MigrationGroup,
    counter: &CountingProgram,
    expected_reason: &str,
) -> Result<()> {
    let pid = world.pid_on("n2", counter)?;
    let check = world.check_to(pid, "n2", "n3")?;
    ensure!(!check.movable && check.blockers.is_empty(), "{check:?}");
    let id = world.begin(pid, "n2", "n3")?;
    let status = world.wait_for_migration("n2", id)?;
    let MigrationOutcome::Kept { reason, .. } = &status.outcome else {
        anyhow::bail!("the process moved to the acceptor: {status:?}");
    };
    eprintln!("{reason}");
    ensure!(reason.contains(expected_reason), "{reason}");
    // The acceptor gives the same reason to a check, and the process is never stopped for the refused move.
    let expected_error = format!("node 3 refused: {}", check.refusals.join("; "));
    ensure!(
        *reason == expected_error,
        "{reason}, but the check said: {expected_error}"
    );
    ensure!(status.freeze_bytes == 0, "{status:?}");
    world.assert_goes_on(counter, "n2")?;
    world.wait_until_clean("n3", counter.program_name())?;
    world.end(counter)
}
