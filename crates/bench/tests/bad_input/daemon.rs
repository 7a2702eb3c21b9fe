//! Daemons that cannot start, or run out of resources.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use holdfast_daemon::exit_code::DaemonExitCode;
use holdfast_testbed::cluster::find_program;

use crate::common::{LoadedGroup, assert_contains, eventually};

#[test]
fn daemon_reports_start_failures() {
    let Some(world) = LoadedGroup::up("daemon") else {
        return;
    };
    assert_missing_capabilities_reported(&world);
    assert_second_daemon_refused(&world);
    assert_unwritable_run_dir_reported(&world);
    assert_bad_configurations_refused(&world);
    handoffs_survive_full_disk(&world);
    world.finish();
}

/// Returns the error text of a daemon that ended with this exit code.
fn error_text(output: &Output, code: DaemonExitCode) -> String {
    assert_eq!(output.status.code(), Some(code as i32), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn holdfastd() -> String {
    find_program("holdfastd").unwrap().display().to_string()
}

/// Writes n2's configuration, with some text replaced, to a file of its own.
fn write_config(world: &LoadedGroup, name: &str, changes: &[(&str, &str)]) -> PathBuf {
    let directory = world.cluster.directory();
    let mut text = fs::read_to_string(directory.join("n2.toml")).unwrap();
    for (from, to) in changes {
        assert!(text.contains(from), "{from} is not in {text}");
        text = text.replacen(from, to, 1);
    }
    let path = directory.join(name);
    fs::write(&path, text).unwrap();
    path
}

fn assert_missing_capabilities_reported(world: &LoadedGroup) {
    let path = write_config(world, "caps.toml", &[]).display().to_string();
    let cases = [
        ("-bpf,-net_admin", ["CAP_BPF", "CAP_NET_ADMIN"]),
        ("-perfmon,-net_raw", ["CAP_PERFMON", "CAP_NET_RAW"]),
    ];
    for (without, capability_names) in cases {
        let command = [
            "setpriv",
            "--bounding-set",
            without,
            &holdfastd(),
            "--config",
            &path,
        ];
        let output = world.run("n2", &command);
        let text = error_text(&output, DaemonExitCode::NoPermission);
        assert_contains(&text, &["holdfastd lacks", "docs/configuration.md"]);
        assert_contains(&text, &capability_names);
    }
    world.assert_unharmed();
}

/// A second daemon, started by mistake on the same node, does not touch the filters of the first.
fn assert_second_daemon_refused(world: &LoadedGroup) {
    let path = write_config(world, "second.toml", &[])
        .display()
        .to_string();
    let pid = world.cluster.daemon_pid("n2").unwrap();
    let output = world.run("n2", &[&holdfastd(), "--config", &path]);
    assert_contains(
        error_text(&output, DaemonExitCode::AlreadyRunning),
        &["another holdfastd", "holdfastd.pid", "stop it"],
    );
    assert_eq!(world.cluster.daemon_pid("n2").unwrap(), pid);
    world.assert_unharmed();
}

fn assert_unwritable_run_dir_reported(world: &LoadedGroup) {
    let run_dir_change = ("[node]\n", "[node]\nrun_dir = \"/proc/holdfast\"\n");
    let path = write_config(world, "run.toml", &[run_dir_change])
        .display()
        .to_string();
    let output = world.run("n2", &[&holdfastd(), "--config", &path]);
    assert_contains(
        error_text(&output, DaemonExitCode::Failure),
        &["/proc/holdfast", "cannot be written", "node.run_dir"],
    );
    world.assert_unharmed();
}

/// Replacements (old, new) in a valid file, and parts of the expected error.
type ConfigCase = (
    &'static [(&'static str, &'static str)],
    &'static [&'static str],
);

fn assert_bad_configurations_refused(world: &LoadedGroup) {
    let cases: [ConfigCase; 9] = [
        (
            &[("[node]", "[node")],
            &["bad.toml:", "docs/configuration.md"],
        ),
        (
            &[("interface = ", "interfaces = ")],
            &["unknown field `interfaces`", "remove the key"],
        ),
        (
            &[("contact = \"n1\"", "contact = \"n7\"")],
            &["group.contact", "no node is called `n7`", "n1, "],
        ),
        (
            &[("reach = \"steer\"", "reach = \"teleport\"")],
            &["group.reach", "teleport", "use one of the values listed"],
        ),
        (
            &[("reach = \"steer\"", "reach = \"broadcast\"")],
            &["needs shared_mac"],
        ),
        (
            &[("name = \"n2\"", "name = \"N 2\"")],
            &["node.name", "is not a name"],
        ),
        (
            &[("port = 7\n", "port = 70000\n")],
            &["service.port", "70000"],
        ),
        (
            &[("protocol = \"tcp\"", "protocol = \"sctp\"")],
            &["service.protocol", "sctp"],
        ),
        (
            &[("[tls]", "[tls]\nciphers = \"none\"")],
            &["tls.ciphers", "unknown field"],
        ),
    ];
    let check = |path: &str| world.run("n2", &[&holdfastd(), "--check", "--config", path]);
    for (changes, error_parts) in cases {
        let path = write_config(world, "bad.toml", changes)
            .display()
            .to_string();
        let text = error_text(&check(&path), DaemonExitCode::Configuration);
        assert_contains(&text, &[&path, "; "]);
        assert_contains(&text, error_parts);
    }
    assert_contains(
        error_text(&check("/nowhere.toml"), DaemonExitCode::Configuration),
        &["/nowhere.toml", "cannot be read"],
    );
    let path = write_config(world, "good.toml", &[]).display().to_string();
    let valid_output = check(&path);
    assert!(valid_output.status.success(), "{valid_output:?}");
    world.assert_unharmed();
}

/// n3's run directory is full: connections still move to and from n3, and the log names the problem. A daemon that
/// starts there serves again, or names the missing space.
fn handoffs_survive_full_disk(world: &LoadedGroup) {
    let fill = "mount -o remount,size=64k /run; dd if=/dev/zero of=/run/full bs=4k 2>&1; df /run >&2; exit 0";
    let fill_output = world.run("n3", &["sh", "-c", fill]);
    assert_contains(
        String::from_utf8_lossy(&fill_output.stdout),
        &["No space left on device"],
    );
    for member in 0..4 {
        world.assert_moves("n2", world.flow(member), "n3");
        world.assert_unharmed();
        world.assert_moves("n3", world.flow(member), "n2");
    }
    world.assert_moves("n2", world.flow(0), "n3");
    let log = world.cluster.directory().join("n3.holdfastd.log");
    let read_log = || fs::read_to_string(&log).unwrap();
    assert_contains(
        read_log(),
        &["journal of arrivals cannot be written", "free space"],
    );

    let starts = world.cluster.daemon_starts("n3");
    world.cluster.kill_daemon("n3").unwrap();
    eventually("n3 is restarted", || {
        world.cluster.daemon_starts("n3") > starts
    });
    world.assert_unharmed();
    let is_ready_again = || read_log().matches("ready node=").count() > 1;
    eventually("n3 serves again, or logs why not", || {
        is_ready_again() || read_log().contains("cannot be written: No space left on device")
    });
    assert!(world.run("n3", &["rm", "/run/full"]).status.success());
    world.cluster.wait_ready().unwrap();
    world.assert_moves("n3", world.flow(0), "n2");
    world.assert_unharmed();
}
