use super::*;

use holdfast_dns::{NameOwner, SelectionRule};

const EXAMPLE: &str = include_str!("../../../../docs/holdfast.example.toml");

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(Path::new("/etc/holdfast/holdfast.toml"), text)
}

/// Parses the example with `from` replaced by `to`, which must make it invalid. Returns the error.
fn error_after_replacing(from: &str, to: &str) -> ConfigError {
    assert!(EXAMPLE.contains(from), "the example lacks {from:?}");
    parse(&EXAMPLE.replacen(from, to, 1)).expect_err(to)
}

#[track_caller]
fn assert_at(error: &ConfigError, key: &str, problem: &str) {
    let line = error.line.expect("a line");
    assert_eq!(error.key.as_deref(), Some(key), "{error}");
    assert!(error.problem.contains(problem), "{error}");
    assert!(!error.what_to_do.is_empty(), "{error}");
    let error_text = error.to_string();
    assert!(
        error_text.starts_with(&format!("/etc/holdfast/holdfast.toml:{line}: {key}: ")),
        "{error_text}"
    );
}

#[test]
fn the_example_is_complete_and_valid() {
    let config = parse(EXAMPLE).unwrap();
    assert_eq!(config.node.name, "n1");
    assert_eq!(config.node.id, NodeId(1));
    assert_eq!(config.node.address, "10.0.0.11".parse::<IpAddr>().unwrap());
    assert_eq!(config.node.port, DEFAULT_PORT);
    assert_eq!(config.group.reach, PacketRouting::Steer);
    assert_eq!(config.group.contact, config.node.id);
    assert_eq!(config.tls.ca, Path::new("/etc/holdfast/tls/ca.pem"));
    let ids: Vec<u16> = config.peers.iter().map(|peer| peer.id.0).collect();
    assert_eq!(ids, [2, 3]);
    assert_eq!(config.id_of("n3"), Some(NodeId(3)));
    assert_eq!(config.name_of(NodeId(1)), Some("n1"));
    assert_eq!(config.services.len(), 3);
    let weights: Vec<u32> = config.services[0].weights.values().copied().collect();
    assert_eq!(weights, [1, 2, 2]);
    assert_eq!(config.services[0].drain, Some(Duration::from_millis(50)));
    assert_eq!(config.services[1].drain, None);
    assert_eq!(config.services[2].placement, PlacementRule::Port);
    assert_eq!(config.services[2].protocol, Protocol::Udp);
    assert_eq!(config.channel.dead_after, Duration::from_secs(1));
    assert_eq!(config.channel.silent_after, Duration::from_millis(200));
    assert!(config.services[0].check.connect);
    assert_eq!(config.services[1].check, CheckConfig::default());
}

#[test]
fn check_of_a_service_is_read() {
    let example = EXAMPLE.replacen(
        "check = { connect = true, ",
        "check = { script = \"/usr/lib/check\", ",
        1,
    );
    let check = &parse(&example).unwrap().services[0].check;
    let script = check.script.as_ref().unwrap();
    assert_eq!(script.path, Path::new("/usr/lib/check"));
    assert!(!script.is_named_by_group);
    assert!(!check.connect);
    let without_stall = EXAMPLE.replacen("stall_ms = 500", "stall_ms = 0", 1);
    let check = &parse(&without_stall).unwrap().services[0].check;
    assert_eq!(check.stall_after, None);
    let error = error_after_replacing("connect = true", "script = \"bin/check\"");
    assert_at(&error, "service.check.script", "not an absolute path");
    let error = error_after_replacing("fall = 2", "fall = 0");
    assert_at(&error, "service.check.fall", "out of range");
    let error = error_after_replacing("placement = \"port\"", "check = { connect = true }");
    assert_at(&error, "service.check.connect", "udp service");
    let error = error_after_replacing("silent_after_ms = 200", "silent_after_ms = 1");
    assert_at(&error, "channel.silent_after_ms", "out of range");
}

#[test]
fn rules_for_the_conductor_are_checked() {
    let balance = &parse(EXAMPLE).unwrap().balance;
    assert_eq!(balance.moves_per_minute, 6);
    let [rule] = &balance.rules[..] else {
        panic!("{balance:?}");
    };
    assert!(rule.process == "mariadbd" && rule.is_pinned, "{rule:?}");
    assert_eq!((&rule.together, &rule.apart), (&None, &None));
    for (from, to, at, problem) in [
        (
            "moves_per_minute = 6",
            "moves_per_minute = 0",
            "balance.moves_per_minute",
            "out of range",
        ),
        (
            "\"mariadbd\"",
            "\"a-name-of-16-byte\"",
            "balance.rule.process",
            "1 to 15 bytes",
        ),
        (
            "pinned = true",
            "pinned = false",
            "balance.rule.process",
            "says nothing",
        ),
        (
            "pinned = true",
            "pined = true",
            "balance.rule.pined",
            "unknown field",
        ),
        (
            "[dns] ",
            "[[balance.rule]]\nprocess = \"mariadbd\"\npinned = true\n[dns] ",
            "balance.rule.process",
            "two rules",
        ),
    ] {
        assert_at(&error_after_replacing(from, to), at, problem);
    }
}

#[test]
fn every_key_of_the_example_is_described() {
    let described = include_str!("../../../../docs/configuration.md");
    let mut keys = 0;
    for line in EXAMPLE.lines() {
        let line = line.trim_start_matches("# ");
        let Some((key, _)) = line.split_once(" = ") else {
            continue;
        };
        if !key.contains(' ') {
            keys += 1;
            assert!(
                described.contains(&format!("`{key}`")),
                "{key} is not described"
            );
        }
    }
    assert!(keys > 30, "only {keys} keys seen");
}

#[test]
fn unknown_missing_and_mistyped_keys_are_named() {
    let error = error_after_replacing("queue_mib = 64", "queue_mb = 64");
    assert_at(&error, "channel.queue_mb", "unknown field `queue_mb`");
    let error = error_after_replacing("reach = \"steer\"", "");
    assert_at(&error, "group", "missing field `reach`");
    let error = error_after_replacing("port = 7400", "port = \"7400\"");
    assert_at(&error, "peer.port", "invalid type");
    let error = error_after_replacing("reach = \"steer\"", "reach = \"mobile\"");
    assert_at(&error, "group.reach", "unknown variant `mobile`");
    let error = error_after_replacing("[app]", "[app");
    assert!(error.line.is_some(), "{error}");
}

#[test]
fn names_and_references_are_checked() {
    let error = error_after_replacing("contact = \"n1\"", "contact = \"n9\"");
    assert_at(&error, "group.contact", "no node is called `n9`");
    assert!(error.what_to_do.contains("n1, n2, n3"), "{error}");
    let error = error_after_replacing("n3 = 2 }", "n4 = 2 }");
    assert_at(&error, "service.weights.n4", "no node is called `n4`");
    let error = error_after_replacing("name = \"n2\"", "name = \"N2\"");
    assert_at(&error, "peer.name", "`N2` is not a name");
    let error = error_after_replacing("name = \"n2\"", "name = \"n1\"");
    assert_at(&error, "peer.name", "appears twice");
    let error = error_after_replacing("id = 3", "id = 2");
    assert_at(&error, "peer.id", "has id 2");
    let error = error_after_replacing("id = 3", "id = 0");
    assert_at(&error, "peer.id", "0 is not a valid id");
    let error = error_after_replacing("interface = \"eth0\"", "interface = \"eth 0\"");
    assert_at(&error, "node.interface", "not a valid interface name");
}

#[test]
fn addresses_are_checked() {
    let error = error_after_replacing("address = \"10.0.0.12\"", "address = \"10.0.0.11\"");
    assert_at(&error, "peer.address", "as another peer has");
    let error = error_after_replacing("address = \"10.0.0.12\"", "address = \"10.0.0.256\"");
    assert_at(&error, "peer.address", "");
    let error = error_after_replacing("address = \"10.0.0.12\"", "address = \"224.0.0.1\"");
    assert_at(&error, "peer.address", "not a unicast address");
    let error = error_after_replacing("address = \"192.0.2.80\"", "address = \"10.0.0.12\"");
    assert_at(&error, "service.address", "a node's own address");
    let error = error_after_replacing(
        "address = \"2001:db8::80\"\nport = 80",
        "address = \"192.0.2.80\"\nport = 80",
    );
    assert_at(&error, "service.port", "appears twice");
    let error = error_after_replacing("name = \"n1\"  ", "name = \"n1\"\naddress = \"10.0.0.99\"");
    assert_at(
        &error,
        "node.address",
        "differs from this node's [[peer]] entry",
    );
}

#[test]
fn ranges_and_contradictions_are_checked() {
    let error = error_after_replacing("capacity = 131072", "capacity = 0");
    assert_at(&error, "node.capacity", "out of range");
    let error = error_after_replacing("dead_after_ms = 1000", "dead_after_ms = 400");
    assert_at(
        &error,
        "channel.dead_after_ms",
        "less than two ping intervals",
    );
    let error = error_after_replacing("reach = \"steer\"", "reach = \"broadcast\"");
    assert_at(&error, "group.reach", "needs shared_mac");
    let error = error_after_replacing("# shared_mac", "shared_mac");
    assert_at(&error, "group.shared_mac", "does not use shared_mac");
    let error = error_after_replacing("{ n1 = 1, n2 = 2, n3 = 2 }", "{ n1 = 0, n2 = 0, n3 = 0 }");
    assert_at(&error, "service.name", "every node's weight is 0");
}

#[test]
fn broadcast_requires_shared_mac() {
    let text = EXAMPLE
        .replace("reach = \"steer\"", "reach = \"broadcast\"")
        .replace("# shared_mac", "shared_mac");
    let shared_mac = [2, 0, 0x5e, 0, 0, 1];
    assert_eq!(
        parse(&text).unwrap().group.reach,
        PacketRouting::Broadcast { shared_mac }
    );
    for bad in [
        "02:00:5e:00:00",
        "02:00:5e:00:00:0g",
        "ff:ff:ff:ff:ff:ff",
        "2:0:5e:0:0:1",
    ] {
        let error = parse(&text.replace("02:00:5e:00:00:01", bad)).unwrap_err();
        assert_at(&error, "group.shared_mac", "not a MAC address");
    }
}

#[test]
fn unlisted_node_needs_id_and_address() {
    let alone = "[node]\nname = \"n9\"\ninterface = \"eth0\"\n[group]\nname = \"g\"\nreach = \"steer\"\n\
                 contact = \"n9\"\n[tls]\nca = \"a\"\ncert = \"b\"\nkey = \"c\"\n";
    assert_at(&parse(alone).unwrap_err(), "node.name", "id is missing");
    let text = alone.replace("name = \"n9\"\n", "name = \"n9\"\nid = 9\n");
    assert_at(
        &parse(&text).unwrap_err(),
        "node.name",
        "address is missing",
    );
    let text = text.replace("id = 9\n", "id = 9\naddress = \"fd00::9\"\n");
    let config = parse(&text).unwrap();
    assert_eq!(config.node.id, NodeId(9));
    assert!(config.group.contact == config.node.id && config.peers.is_empty());
    assert_eq!(config.log.filter, "info");
}

#[test]
fn a_missing_file_is_named() {
    let error = Config::load(Path::new("/nonexistent/holdfast.toml")).unwrap_err();
    let error_text = error.to_string();
    assert!(
        error_text.starts_with("/nonexistent/holdfast.toml: cannot be read"),
        "{error_text}"
    );
}

#[test]
fn the_cgroup_root_is_read_from_the_mounts() {
    let mounts = "proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n\
                  cgroup2 /mnt/my\\040groups cgroup2 rw 0 0\n";
    assert_eq!(cgroup2_root(mounts), Some("/mnt/my groups".into()));
    assert_eq!(cgroup2_root("proc /proc proc rw 0 0\n"), None);
}

/// Parses the example with bytes changed and parts removed, doubled and cut. The result must be a configuration, or an
/// error with a remedy.
#[test]
fn mutated_text_is_refused_or_parsed() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |end: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % end as u64) as usize
    };
    let (mut good, mut bad) = (0, 0);
    for _ in 0..4000 {
        let mut bytes = EXAMPLE.as_bytes().to_vec();
        for _ in 0..=random(3) {
            // Two mutations may have removed everything.
            if bytes.is_empty() {
                break;
            }
            let at = random(bytes.len());
            let end = (at + 1 + random(40)).min(bytes.len());
            match random(5) {
                0 => bytes[at] ^= 1 << random(7),
                1 => bytes[at] = b"[]=\"'.#\n-9"[random(10)],
                2 => drop(bytes.drain(at..end)),
                3 => {
                    let piece = bytes[at..end].to_vec();
                    let to = random(bytes.len());
                    bytes.splice(to..to, piece);
                }
                _ => bytes.truncate(at.max(1)),
            }
        }
        let Ok(text) = String::from_utf8(bytes) else {
            continue;
        };
        match parse(&text) {
            Ok(_) => good += 1,
            Err(error) => {
                bad += 1;
                assert!(!error.problem.is_empty() && !error.what_to_do.is_empty());
                let lines = text.lines().count().max(1);
                assert!(
                    error
                        .line
                        .is_none_or(|line| (1..=lines + 1).contains(&line))
                );
            }
        }
    }
    assert!(good > 100 && bad > 100, "{good} read, {bad} refused");
}

#[test]
fn migration_settings_are_checked() {
    let config = parse(EXAMPLE).unwrap().migration;
    assert_eq!(config.files, [Path::new("/var/log/game")]);
    assert_eq!(
        config.families,
        [SocketFamily::Ipv4, SocketFamily::Ipv6].into()
    );
    assert_eq!(config.ports, [].into());
    let with_ports = EXAMPLE.replacen("families = ", "ports = [80, 443]\nfamilies = ", 1);
    let ports = parse(&with_ports).unwrap().migration.ports;
    assert_eq!(ports, [80, 443].into());
    let left_out = EXAMPLE.replacen("families = ", "# families = ", 1);
    let config = parse(&left_out).unwrap().migration;
    assert_eq!(config.families, SocketFamily::ALL.into());
    let error = error_after_replacing("\"ipv6\"]", "\"ipx\"]");
    assert_at(&error, "migration.families", "ipx");
    let error = error_after_replacing("files = [\"/var", "files = [\"var");
    assert_at(&error, "migration.files", "not an absolute path");
}

#[test]
fn joining_settings_are_checked() {
    let joining = parse(EXAMPLE).unwrap().joining.unwrap();
    let authority = Path::new("/var/lib/holdfast/authority");
    assert_eq!(joining.authority.as_deref(), Some(authority));
    assert_eq!((joining.port, joining.days), (7401, 90));
    let error = error_after_replacing("port = 7401", "port = 7400");
    assert_at(&error, "joining.port", "between nodes");
    let error = error_after_replacing("days = 90", "days = 826");
    assert_at(&error, "joining.days", "out of range");
    let left_out = EXAMPLE.replacen("authority =", "# authority =", 1);
    assert_eq!(parse(&left_out).unwrap().joining.unwrap().authority, None);
}

#[test]
fn file_of_a_joined_node_is_valid() {
    use holdfast_api::enrolment::{GroupReach, JoinSettings, KnownNode, NodeFile};
    let node = |number: u16| KnownNode {
        name: format!("n{number}"),
        id: number,
        address: SocketAddr::from(([10, 0, 0, number as u8], 7400)),
    };
    let mut file = NodeFile {
        name: "n4".to_owned(),
        address: "fd00::4".parse().unwrap(),
        interface: "eth0".to_owned(),
        state_dir: None,
        tls_dir: "/var/lib/holdfast/tls".into(),
        accepts_hosts: false,
        authority_dir: None,
        only_serves: true,
        has_revocation_list: true,
        group: JoinSettings {
            name: "web".to_owned(),
            reach: GroupReach::Broadcast {
                shared_mac: [2, 0, 0x5e, 0, 0, 1],
            },
            contact: Some("n1".to_owned()),
            nodes: vec![node(1), node(2), node(5)],
            revocations: None,
        },
    };
    let config = parse(&file.text()).unwrap();
    assert_eq!(
        (config.node.id, config.node.name.as_str()),
        (NodeId(3), "n4")
    );
    assert_eq!(config.peers.len(), 3);
    assert_eq!(config.name_of(config.group.contact), Some("n1"));
    assert!(matches!(
        config.group.reach,
        PacketRouting::Broadcast { .. }
    ));
    assert_eq!(config.joining, None);
    file.accepts_hosts = true;
    file.authority_dir = Some("/var/lib/holdfast/authority".into());
    file.state_dir = Some("/srv/holdfast".into());
    file.group.reach = GroupReach::Steer;
    let config = parse(&file.text()).unwrap();
    assert_eq!(config.node.state_dir, Path::new("/srv/holdfast"));
    assert!(config.joining.unwrap().authority.is_some());
    // A group that runs itself: the file has seeds instead of the whole group.
    file.group.contact = None;
    file.has_revocation_list = false;
    let config = parse(&file.text()).unwrap();
    let self_running = config.group.self_running.unwrap();
    assert_eq!(
        (self_running.role, self_running.seeds.len()),
        (JoinRole::ServerNode, 3)
    );
    assert_eq!((config.tls.crl, config.peers.len()), (None, 0));
}

/// The file of a node whose group runs itself.
const SELF_RUN: &str = r#"
[node]
name = "n1"
address = "10.0.0.11"
interface = "eth0"

[group]
name = "files"
reach = "steer"
role = "server"
seeds = ["10.0.0.12", "10.0.0.13:7500"]

[tls]
ca = "ca.pem"
cert = "n1.pem"
key = "n1.key"
"#;

#[test]
fn group_without_contact_runs_itself() {
    let mut config = parse(SELF_RUN).unwrap();
    let self_running = config.group.self_running.clone().unwrap();
    assert_eq!(self_running.role, JoinRole::ServerNode);
    let seeds = ["10.0.0.12:7400", "10.0.0.13:7500"].map(|seed| seed.parse().unwrap());
    assert_eq!(self_running.seeds, seeds);
    assert!(config.peers.is_empty());
    let member = |id: u16| Member {
        id: NodeId(id),
        name: format!("n{id}").parse().unwrap(),
        address: format!("10.0.0.1{id}:7400").parse().unwrap(),
        join: holdfast_wire::membership_frames::JoinNumber(1),
    };
    config.join_group(NodeId(1), NodeId(2), &[member(1), member(2)]);
    assert_eq!(config.name_of(NodeId(2)), Some("n2"));
    assert_eq!(
        (config.node.id, config.group.contact),
        (NodeId(1), NodeId(2))
    );
    let default = parse(&SELF_RUN.replace("role = \"server\"", "")).unwrap();
    assert_eq!(default.group.self_running.unwrap().role, JoinRole::Backup);
}

#[test]
fn keys_of_a_configured_group_contradict_a_group_that_runs_itself() {
    let with = |from: &str, to: &str| parse(&SELF_RUN.replacen(from, to, 1)).expect_err(to);
    let error = with("address =", "id = 3\naddress =");
    assert_at(&error, "node.id", "gives each node its number");
    let error = with("10.0.0.12", "n2");
    assert_eq!(error.problem, "`n2` is not the address of a daemon");
    let error = with(
        "[tls]",
        "[[peer]]\nname = \"n2\"\naddress = \"10.0.0.12\"\n[tls]",
    );
    assert!(error.problem.contains("finds its nodes itself"), "{error}");
    let error = error_after_replacing(
        "contact = \"n1\"",
        "contact = \"n1\"\nseeds = [\"10.0.0.1\"]",
    );
    assert!(error.problem.contains("does not run itself"), "{error}");
}

/// Returns the `[dns]` of the example with these lines added.
fn dns_with(lines: &str) -> Result<DnsConfig, ConfigError> {
    let text = EXAMPLE.replacen("ttl_s = 5", &format!("{lines}\nttl_s = 5"), 1);
    parse(&text).map(|config| config.dns.expect("[dns]"))
}

#[test]
fn names_of_the_example_are_read() {
    let dns = parse(EXAMPLE).unwrap().dns.unwrap();
    assert_eq!(dns.listen, ["10.0.0.11:53".parse().unwrap()]);
    assert_eq!((dns.zone.ttl_s, dns.responses_per_s), (5, 200));
    let servers: Vec<&str> = dns
        .zone
        .name_servers
        .iter()
        .map(|it| it.label.as_str())
        .collect();
    assert_eq!(servers, ["n1", "n2"]);
    let [www] = &dns.names[..] else {
        panic!("{:?}", dns.names);
    };
    assert_eq!(www.owner, NameOwner::Below("www".parse().unwrap()));
    assert_eq!((www.rule, www.answers_max), (SelectionRule::Weighted, 1));
    let weights: Vec<u32> = www.addresses.iter().map(|it| it.weight).collect();
    assert_eq!(weights, [3, 1]);
}

#[test]
fn dns_has_defaults() {
    let section = EXAMPLE.find("\n[dns]").expect("[dns]");
    let end = EXAMPLE[section..].find("\n[metrics]").expect("[metrics]");
    let mut text = EXAMPLE.to_owned();
    text.replace_range(section..section + end, "\n[dns]\nzone = \"a.test\"\n");
    let dns = parse(&text).unwrap().dns.unwrap();
    assert_eq!(dns.listen, ["10.0.0.11:53".parse().unwrap()]);
    assert_eq!(dns.zone.name_servers[0].label.as_str(), "n1");
    assert_eq!(dns.names, []);
    text.replace_range(section..section + "\n[dns]\nzone = \"a.test\"\n".len(), "");
    assert_eq!(parse(&text).unwrap().dns, None);
}

#[test]
fn impossible_names_are_refused() {
    let change = |from: &str, to: &str, problem: &str| {
        let error = error_after_replacing(from, to);
        let key = error.key.as_deref().unwrap_or_default();
        assert!(key.starts_with("dns."), "{error}");
        assert!(error.problem.contains(problem), "{error}");
    };
    change(
        "zone = \"example.test\"",
        "zone = \"example..test\"",
        "not a label",
    );
    change(
        "listen = [\"10.0.0.11:53\"]",
        "listen = [\"0.0.0.0:53\"]",
        "one socket",
    );
    change("name = \"www\"", "name = \"a.b\"", "not a label");
    change(
        "name = \"www\"\nservice = \"http\"",
        "name = \"@\"\n#",
        "what is offered",
    );
    change("weight = 3 }", "weight = 1001 }", "out of range");
    change("ttl_s = 5", "ttl_s = 90000", "out of range");
    assert!(dns_with("").is_ok());
    assert!(dns_with("unknown = 1").is_err());
}

#[test]
fn store_in_etcd_is_read_and_checked() {
    let with_store = |store: &str, section: &str| {
        let text = SELF_RUN.replace("role = \"server\"", store);
        parse(&format!("{text}\n{section}"))
    };
    let store = "store = \"etcd\"";
    let section = "[etcd]\nendpoints = [\"https://10.0.0.21:2379\", \"http://e2:2379\"]\nca = \"etcd.pem\"\n\
                   user = \"holdfast\"\npassword_file = \"/run/password\"";
    let config = with_store(store, section).unwrap();
    let etcd = config.group.self_running.unwrap().store.unwrap();
    let urls: Vec<String> = etcd.endpoints.iter().map(ToString::to_string).collect();
    assert_eq!(urls, ["https://10.0.0.21:2379", "http://e2:2379"]);
    assert_eq!(etcd.prefix, "/holdfast/");
    assert!(etcd.ca.unwrap().ends_with("etcd.pem"));
    assert_eq!(
        with_store("store = \"voters\"", "")
            .unwrap()
            .group
            .self_running
            .unwrap()
            .store,
        None
    );
    for (store, section, problem) in [
        (store, "", "needs section [etcd]"),
        ("", section, "section [etcd] has no effect"),
        (store, "[etcd]\nendpoints = []", "there are 0 endpoints"),
        (
            store,
            "[etcd]\nendpoints = [\"e1:2379\"]",
            "`e1:2379` is not the URL",
        ),
        (
            store,
            "[etcd]\nendpoints = [\"https://e1:2379\"]",
            "needs `ca`",
        ),
        (
            store,
            "[etcd]\nendpoints = [\"http://e1:1\"]\nkey = \"k\"",
            "need each other",
        ),
        (
            store,
            "[etcd]\nendpoints = [\"http://e1:1\"]\nuser = \"u\"",
            "need each other",
        ),
        (
            store,
            "[etcd]\nendpoints = [\"http://e1:1\"]\nprefix = \"a b\"",
            "`a b` is not the beginning",
        ),
    ] {
        let error = with_store(store, section).expect_err(problem);
        assert!(error.problem.contains(problem), "{error}");
    }
    let error = error_after_replacing("contact = \"n1\"", "contact = \"n1\"\nstore = \"voters\"");
    assert!(error.problem.contains("does not run itself"), "{error}");
}
