//! Daemons that cannot start, or run out of resources.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use holdfast_bench::cluster::find_program;

use crate::common::{World, eventually, says};

#[test]
fn daemons_that_cannot_start() {
    let Some(world) = World::up("daemon") else {
        return;
    };
    missing_capabilities(&world);
    second_daemon(&world);
    run_dir_that_cannot_be_written(&world);
    bad_configurations(&world);
    full_disk(&world);
    world.end();
}

fn error(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn holdfastd() -> String {
    find_program("holdfastd").unwrap().display().to_string()
}

/// Writes n2's configuration, with some text replaced, to a file of its own.
fn config(world: &World, name: &str, changes: &[(&str, &str)]) -> PathBuf {
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

fn missing_capabilities(world: &World) {
    let path = config(world, "caps.toml", &[]).display().to_string();
    let cases = [
        ("-bpf,-net_admin", ["CAP_BPF", "CAP_NET_ADMIN"]),
        ("-perfmon,-net_raw", ["CAP_PERFMON", "CAP_NET_RAW"]),
    ];
    for (without, names) in cases {
        let command = [
            "setpriv",
            "--bounding-set",
            without,
            &holdfastd(),
            "--config",
            &path,
        ];
        let text = error(&world.run("n2", &command));
        says(&text, &["holdfastd lacks", "docs/configuration.md"]);
        says(&text, &names);
    }
    world.unharmed();
}

/// A second daemon, started by mistake on the same node, does not touch the filters of the first.
fn second_daemon(world: &World) {
    let path = config(world, "second.toml", &[]).display().to_string();
    let pid = world.cluster.daemon_pid("n2").unwrap();
    let output = world.run("n2", &[&holdfastd(), "--config", &path]);
    says(
        error(&output),
        &["another holdfastd", "holdfastd.pid", "stop it"],
    );
    assert_eq!(world.cluster.daemon_pid("n2").unwrap(), pid);
    world.unharmed();
}

fn run_dir_that_cannot_be_written(world: &World) {
    let other = ("[node]\n", "[node]\nrun_dir = \"/proc/holdfast\"\n");
    let path = config(world, "run.toml", &[other]).display().to_string();
    let output = world.run("n2", &[&holdfastd(), "--config", &path]);
    says(
        error(&output),
        &["/proc/holdfast", "cannot be written", "node.run_dir"],
    );
    world.unharmed();
}

/// Replacements (old, new) in a valid file, and parts of the expected error.
type Case = (
    &'static [(&'static str, &'static str)],
    &'static [&'static str],
);

fn bad_configurations(world: &World) {
    let cases: [Case; 9] = [
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
            &["group.reach", "teleport", "use one of the values named"],
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
    for (changes, words) in cases {
        let path = config(world, "bad.toml", changes).display().to_string();
        let text = error(&check(&path));
        says(&text, &[&path, "; "]);
        says(&text, words);
    }
    says(
        error(&check("/nowhere.toml")),
        &["/nowhere.toml", "cannot be read"],
    );
    let path = config(world, "good.toml", &[]).display().to_string();
    let good = check(&path);
    assert!(good.status.success(), "{good:?}");
    world.unharmed();
}

/// n3's run directory is full: connections still move to and from n3, and the log names the problem. A daemon that
/// starts there serves again, or names the missing space.
fn full_disk(world: &World) {
    let fill = "mount -o remount,size=64k /run; dd if=/dev/zero of=/run/full bs=4k 2>&1; df /run >&2; exit 0";
    let filled = world.run("n3", &["sh", "-c", fill]);
    says(
        String::from_utf8_lossy(&filled.stdout),
        &["No space left on device"],
    );
    for member in 0..4 {
        world.moves("n2", world.flow(member), "n3");
        world.unharmed();
        world.moves("n3", world.flow(member), "n2");
    }
    world.moves("n2", world.flow(0), "n3");
    let log = world.cluster.directory().join("n3.holdfastd.log");
    let log = || fs::read_to_string(&log).unwrap();
    says(
        log(),
        &["journal of arrivals cannot be written", "free space"],
    );

    let starts = world.cluster.daemon_starts("n3");
    world.cluster.kill_daemon("n3").unwrap();
    eventually("n3 is started again", || {
        world.cluster.daemon_starts("n3") > starts
    });
    world.unharmed();
    let ready = || log().matches("ready node=").count() > 1;
    eventually("n3 serves again, or says why not", || {
        ready() || log().contains("cannot be written: No space left on device")
    });
    assert!(world.run("n3", &["rm", "/run/full"]).status.success());
    world.cluster.wait_ready().unwrap();
    world.moves("n3", world.flow(0), "n2");
    world.unharmed();
}
