//! Starts that fail leave nothing behind, starts with other settings lose no connection, and a stopped daemon's remains can
//! be removed. Needs root.

mod common;

use std::fs;
use std::process::Output;

use holdfast_daemon::exit_code::DaemonExitCode;
use holdfast_testbed::cluster::find_program;
use holdfast_testbed::connection_load::open_connections;
use nix::sys::signal::Signal;
use toml::{Table, Value};

use common::{LoadedGroup, PATIENCE, assert_contains, eventually};

/// Steps of a start, after each of which a test can make the start fail.
const STEPS: [&str; 12] = [
    "channel",
    "sockets",
    "moves",
    "maps",
    "hold",
    "settings",
    "filters",
    "cgroup",
    "addresses",
    "routes",
    "arrivals",
    "events",
];

/// Everything on a host that a daemon changes and could leave behind, a line for each item.
const INVENTORY: &str = "
    ip -o address show | sed 's/  *valid_lft.*//'
    ip -o link show | sed 's/^[0-9]*: //; s/ mtu.*//' | sort
    ip -o -d link show eth0 | grep -o 'prog/xdp id' || true
    ip rule show; ip -6 rule show
    ip route show table all; ip -6 route show table all | grep -v ' expires '
    ls /sys/fs/bpf/holdfast 2>&1 || true
    ss -Hxl | awk '{print $5}' | sort
    ss -Htln | awk '{print $4}' | sort
    find /sys/fs/cgroup -type d | sort
    sysctl net.ipv4.conf.eth0.arp_ignore net.ipv4.conf.eth0.arp_announce
    cat STATE/host_changes.json 2>&1 || true
";

/// A node's host with a daemon that tests stop and start.
struct StoppableNode<'a> {
    group: &'a LoadedGroup,
    name: &'static str,
}

impl StoppableNode<'_> {
    fn stop(&self) {
        let cluster = &self.group.cluster;
        cluster.set_daemon_restart(self.name, false);
        cluster.signal_daemon(self.name, Signal::SIGTERM).unwrap();
        eventually("the daemon has ended", || {
            cluster.daemon_pid(self.name).unwrap().is_none()
        });
    }

    fn start(&self) {
        self.group.cluster.set_daemon_restart(self.name, true);
        self.group.cluster.wait_ready().unwrap();
    }

    fn restart(&self) {
        self.stop();
        self.start();
    }

    /// Runs `holdfastd` with further arguments, of which the first may be `NAME=VALUE` for its environment.
    fn holdfastd(&self, arguments: &[&str]) -> Output {
        let (variables, arguments) = match arguments.split_first() {
            Some((first, rest)) if first.contains('=') => (&[*first][..], rest),
            _ => (&[][..], arguments),
        };
        let program = find_program("holdfastd").unwrap().display().to_string();
        let file = self.config_path();
        let daemon = [program.as_str(), "--config", &file];
        self.group.run(
            self.name,
            &[&["env"], variables, &daemon, arguments].concat(),
        )
    }

    fn config_path(&self) -> String {
        let directory = self.group.cluster.directory();
        directory
            .join(format!("{}.toml", self.name))
            .display()
            .to_string()
    }

    /// Changes the configuration file; returns the earlier text.
    fn configure(&self, change: impl FnOnce(&mut Table)) -> String {
        let before = fs::read_to_string(self.config_path()).unwrap();
        let mut table: Table = before.parse().unwrap();
        change(&mut table);
        fs::write(self.config_path(), table.to_string()).unwrap();
        before
    }

    fn inventory(&self) -> String {
        let state = self.group.cluster.directory().join(self.name);
        let script = INVENTORY.replace("STATE", &state.display().to_string());
        let output = self.group.run(self.name, &["sh", "-c", &script]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn assert_inventory(&self, expected: &str, when: &str) {
        let last = std::cell::RefCell::new(String::new());
        // The kernel frees links and devices a moment after the daemon has ended.
        let is_equal = || {
            *last.borrow_mut() = self.inventory();
            *last.borrow() == expected
        };
        let deadline = std::time::Instant::now() + PATIENCE / 6;
        while !is_equal() {
            if std::time::Instant::now() > deadline {
                assert_eq!(*last.borrow(), expected, "{when}");
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    fn clean(&self, arguments: &[&str]) -> Output {
        self.holdfastd(&[&["--clean"], arguments].concat())
    }

    fn addresses(&self) -> String {
        let output = self.group.run(self.name, &["ip", "-o", "address", "show"]);
        String::from_utf8(output.stdout).unwrap()
    }
}

fn text(output: &Output) -> String {
    let of = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}", of(&output.stdout), of(&output.stderr))
}

fn node_table(table: &mut Table) -> &mut Table {
    table["node"].as_table_mut().unwrap()
}

/// The daemon of n3 fails at each step, first on a host where none has run, then on one where a daemon has ended.
#[test]
fn failed_start_leaves_nothing_behind() {
    let Some(group) = LoadedGroup::up("failed-start") else {
        return;
    };
    for name in ["n3", "n2"] {
        let node = StoppableNode {
            group: &group,
            name,
        };
        node.stop();
        if name == "n3" {
            assert!(node.clean(&[]).status.success());
        }
        let before = node.inventory();
        for step in STEPS {
            let output = node.holdfastd(&[&format!("HOLDFAST_TEST_FAIL_START={step}")]);
            let code = Some(DaemonExitCode::Failure as i32);
            assert_eq!(output.status.code(), code, "{step}: {}", text(&output));
            assert_contains(text(&output), &["a test makes the start fail", step]);
            node.assert_inventory(&before, step);
            group.assert_unharmed();
        }
        node.start();
        group.assert_unharmed();
    }
    group.finish();
}

#[test]
fn connections_survive_a_changed_capacity() {
    let Some(group) = LoadedGroup::up("capacity") else {
        return;
    };
    let node = StoppableNode {
        group: &group,
        name: "n2",
    };
    let set_capacity = |capacity: i64| {
        node.configure(|table| {
            node_table(table).insert("capacity".into(), Value::from(capacity));
        })
    };
    for capacity in [4_096, 1_000_000, 100] {
        set_capacity(capacity);
        let output = node.holdfastd(&["--check"]);
        assert_contains(text(&output), &["map flows", &capacity.to_string()]);
        node.restart();
        group.assert_unharmed();
        // Connections move with their entries, and new ones begin.
        group.assert_moves("n2", group.flow(0), "n3");
        group.assert_moves("n3", group.flow(0), "n2");
    }
    node.stop();
    let before = node.inventory();
    let valid = set_capacity(10);
    for output in [node.holdfastd(&["--check"]), node.holdfastd(&[])] {
        assert_eq!(
            output.status.code(),
            Some(DaemonExitCode::Configuration as i32),
            "{}",
            text(&output)
        );
        assert_contains(text(&output), &["node.capacity = 10", "hand flows off"]);
    }
    node.assert_inventory(&before, "a refused capacity");
    group.assert_unharmed();
    fs::write(node.config_path(), valid).unwrap();
    node.start();
    group.finish();
}

#[test]
fn check_lists_all_problems_and_changes_nothing() {
    let Some(group) = LoadedGroup::up("check") else {
        return;
    };
    let node = StoppableNode {
        group: &group,
        name: "n3",
    };
    // The running daemon has the addresses and sockets.
    let running = node.holdfastd(&["--check"]);
    assert!(running.status.success(), "{}", text(&running));
    node.stop();
    assert!(node.clean(&[]).status.success());
    let before = node.inventory();
    let valid = node.configure(|table| {
        let certificate = table["tls"]["cert"]
            .as_str()
            .unwrap()
            .replace("n3.pem", "n2.pem");
        let metrics = Table::from_iter([("listen".to_owned(), "192.0.2.99:9000".into())]);
        table["tls"]["cert"] = certificate.into();
        table["tls"]["key"] = "/nowhere/n3.key".into();
        node_table(table).insert("interface".into(), "no-such".into());
        node_table(table).insert("cgroup".into(), "/proc/self".into());
        node_table(table).insert("bpffs".into(), "/tmp/pins".into());
        node_table(table).insert("state_dir".into(), "/proc/version/state".into());
        table.insert("metrics".into(), metrics.into());
        table.insert(
            "log".into(),
            Table::from_iter([("filter".to_owned(), "info,=".into())]).into(),
        );
        table.insert(
            "app".into(),
            Table::from_iter([("group".to_owned(), "no-such-group".into())]).into(),
        );
    });
    let output = node.holdfastd(&["--check"]);
    let code = Some(DaemonExitCode::Configuration as i32);
    assert_eq!(output.status.code(), code, "{}", text(&output));
    let problems = [
        "log.filter `info,=`",
        "not of node `n3`",
        "/nowhere/n3.key",
        "interface no-such (node.interface)",
        "node.state_dir",
        "there is no group `no-such-group`",
        "metrics.listen: 192.0.2.99:9000",
        "correct node.cgroup",
        "not a directory of a BPF file system",
    ];
    assert_contains(text(&output), &problems);
    assert_eq!(
        text(&output).lines().count(),
        problems.len(),
        "{}",
        text(&output)
    );
    // The start refuses the same; the log's filter comes first, because the start logs the others.
    assert_contains(text(&node.holdfastd(&[])), &["log.filter `info,=`"]);
    node.assert_inventory(&before, "a check");
    fs::write(node.config_path(), valid).unwrap();
    node.start();
    group.finish();
}

#[test]
fn clean_removes_what_a_stopped_daemon_keeps() {
    let Some(group) = LoadedGroup::up("clean") else {
        return;
    };
    let node = StoppableNode {
        group: &group,
        name: "n3",
    };
    let service = group.service.ip().to_string();
    let refused = node.clean(&[]);
    let code = Some(DaemonExitCode::AlreadyRunning as i32);
    assert_eq!(refused.status.code(), code, "{}", text(&refused));
    node.stop();
    let stopped = node.inventory();
    assert_contains(&stopped, &[&service, "link-holdfast_ingress", "flows"]);
    let plan = node.clean(&["--dry-run"]);
    assert_contains(
        text(&plan),
        &[
            &format!("would remove service address {service} from lo"),
            "arp_ignore",
            "program links: link-holdfast",
            "pinned maps: ",
        ],
    );
    node.assert_inventory(&stopped, "a dry run");
    let done = node.clean(&["--json"]);
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(report["dry_run"], false);
    assert_eq!(report["addresses"][0]["interface"], "lo");
    let empty = node.inventory();
    let service_on_host = format!("inet {service}/");
    for left in [service_on_host.as_str(), "link-holdfast", "hf-hold"] {
        assert!(!empty.contains(left), "{left}: {empty}");
    }
    assert_contains(text(&node.clean(&[])), &["there is nothing to remove"]);
    node.start();
    group.finish();
}

/// Of two addresses of removed services, the one that the daemon added goes, and the operator's stays.
#[test]
fn removed_service_loses_its_address() {
    let Some(group) = LoadedGroup::up("removed") else {
        return;
    };
    let node = StoppableNode {
        group: &group,
        name: "n1",
    };
    let [added, operators] = ["198.51.100.80", "198.51.100.81"];
    let own = format!("{operators}/32");
    let command = ["ip", "address", "add", &own, "dev", "eth0"];
    assert!(group.run("n1", &command).status.success());
    let without = node.configure(|table| {
        let services = table["service"].as_array_mut().unwrap();
        for address in [added, operators] {
            let mut service = services[0].clone();
            let table = service.as_table_mut().unwrap();
            table.insert("address".into(), address.into());
            services.push(service);
        }
    });
    for _ in 0..2 {
        node.restart();
        assert_contains(node.addresses(), &[added, operators]);
    }
    fs::write(node.config_path(), without).unwrap();
    node.restart();
    let left = node.addresses();
    assert!(left.contains(operators) && !left.contains(added), "{left}");
    assert_contains(left, &[&group.service.ip().to_string()]);
    group.finish();
}

/// A connection ends while the contact node's daemon is down, and then the owner's daemon dies before its report has arrived.
#[test]
fn record_of_ended_connection_is_removed_after_owner_daemon_crash() {
    let Some(group) = LoadedGroup::up("ended") else {
        return;
    };
    let cluster = &group.cluster;
    let stream = open_connections(cluster.lab(), "c1", group.service, 1)
        .unwrap()
        .remove(0);
    let flow = group.flow_of(group.service, stream.local_addr().unwrap());
    eventually("the connection is recorded", || {
        group.owner(flow).as_deref() == Some("n2")
    });
    cluster.set_daemon_restart("n1", false);
    cluster.kill_daemon("n1").unwrap();
    drop(stream);
    // A node's list lacks closed connections.
    eventually("the owner has closed the connection", || {
        group.owner_at("n2", flow).is_none()
    });
    let starts = cluster.daemon_starts("n2");
    cluster.kill_daemon("n2").unwrap();
    eventually("the owner's daemon is back", || {
        cluster.daemon_starts("n2") > starts
    });
    cluster.set_daemon_restart("n1", true);
    cluster.wait_ready().unwrap();
    eventually("the record is removed", || group.owner(flow).is_none());
    group.finish();
}
