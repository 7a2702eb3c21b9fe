//! DNS answers over the contact nodes of two groups, as `dig` sees them: turns, weights, and no address that does not
//! serve. Needs root, and `dig`.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use holdfast_api::Protocol;
use holdfast_api::ca::{CertificateAuthority, NODE_DAYS};
use holdfast_api::control::{
    BlockingControlClient, NewService, ServiceChange, ServiceChangeRequest, ServiceSettings,
};
use holdfast_lab::{Lab, LabSpec};

/// Port of the service.
const PORT: u16 = 7;
/// Longest wait for any condition, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time until answers lack a host that was cut off, without the time for which resolvers keep an answer: two
/// failed checks, and a margin for a loaded machine.
const REMOVAL_TIME: Duration = Duration::from_secs(4);
/// A server that returns lines.
const SERVER: &str = "my $l = IO::Socket::INET->new(LocalPort => 7, Listen => 64, ReuseAddr => 1) or die $!; \
                      while (my $c = $l->accept) { while (<$c>) { print $c $_ } close $c }";

/// Group `a` runs itself: n1 is its contact node, n2 a server node. Group `b` is n3 alone, by its file.
struct TwoGroups {
    /// Daemons and servers by host; killed before the lab ends.
    daemons: Vec<Child>,
    servers: BTreeMap<&'static str, Child>,
    lab: Lab,
    directory: tempfile::TempDir,
}

impl TwoGroups {
    fn up() -> TwoGroups {
        holdfast_lab::prune().unwrap();
        let name = format!("dns-{}", std::process::id());
        let lab = Lab::up(&LabSpec::new(&name).nodes(3).clients(1)).unwrap();
        let mut groups = TwoGroups {
            daemons: Vec::new(),
            servers: BTreeMap::new(),
            lab,
            directory: tempfile::tempdir().unwrap(),
        };
        let authority = CertificateAuthority::init(&groups.path("ca"), "g").unwrap();
        for node in ["n1", "n2", "n3"] {
            authority.issue(node, &[], NODE_DAYS).unwrap();
            std::fs::write(groups.path(&format!("{node}.toml")), groups.config(node)).unwrap();
        }
        let created = groups.daemon("n1").arg("--create-group").status().unwrap();
        assert!(created.success());
        for node in ["n1", "n2", "n3"] {
            let checked = groups.daemon(node).arg("--check").status().unwrap();
            assert!(checked.success());
            let daemon = groups.daemon(node).spawn().unwrap();
            groups.daemons.push(daemon);
            let mut server = groups.lab.command(node).unwrap();
            server.args(["perl", "-MIO::Socket::INET", "-e", SERVER]);
            groups.servers.insert(node, server.spawn().unwrap());
        }
        // Here n3 is a client of group `a`: its device must complete checksums, as a network card would.
        groups.run_in_host("n3", &["ethtool", "-K", "eth0", "tx", "off"]);
        groups
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Service addresses of the two groups.
    fn service_addresses(&self) -> [Ipv4Addr; 2] {
        let (first, _) = self.lab.service_address();
        [first, Ipv4Addr::from_bits(first.to_bits() + 50)]
    }

    fn address(&self, host: &str) -> Ipv4Addr {
        self.lab.address(host).unwrap().0
    }

    fn config(&self, node: &str) -> String {
        let own = self.address(node);
        let (state, ca) = (self.path(node), self.path("ca"));
        let (state, ca) = (state.display(), ca.display());
        let (n1, n2, n3) = (self.address("n1"), self.address("n2"), self.address("n3"));
        let [a, b] = self.service_addresses();
        let group = match node {
            "n1" => "name = \"a\"\nrole = \"backup\"\n".to_owned(),
            "n2" => format!("name = \"a\"\nrole = \"server\"\nseeds = [\"{n1}\"]\n"),
            _ => format!(
                "name = \"b\"\ncontact = \"n3\"\n[[peer]]\nname = \"n3\"\naddress = \"{n3}\"\n\
                 [[service]]\nname = \"echo\"\naddress = \"{b}\"\nport = {PORT}\nprotocol = \"tcp\"\n"
            ),
        };
        let name = |name: &str, weight: u32| {
            format!(
                "[[dns.name]]\nname = \"{name}\"\nservice = \"echo\"\nport = {PORT}\n\
                 addresses = [{{ address = \"{a}\", weight = {weight} }}, {{ address = \"{b}\" }}]\n"
            )
        };
        format!(
            "[node]\nname = \"{node}\"\naddress = \"{own}\"\ninterface = \"eth0\"\nstate_dir = \"{state}\"\n\
             [tls]\nca = \"{ca}/ca.pem\"\ncert = \"{ca}/{node}.pem\"\nkey = \"{ca}/{node}.key\"\n\
             [dns]\nzone = \"example.test\"\nresponses_per_s = 100000\n\
             name_servers = {{ n2 = [\"{n2}\"], n3 = [\"{n3}\"] }}\n{}{}\
             [group]\nreach = \"steer\"\n{group}",
            name("www", 1),
            name("heavy", 3),
        )
    }

    fn daemon(&self, node: &str) -> Command {
        let mut command = self.lab.command(node).unwrap();
        command.arg(env!("CARGO_BIN_EXE_holdfastd"));
        command
            .arg("--config")
            .arg(self.path(&format!("{node}.toml")));
        command
    }

    fn run_in_host(&self, host: &str, words: &[&str]) {
        let mut command = self.lab.command(host).unwrap();
        let output = command.args(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Adds the service of group `a`.
    fn add_service(&self) {
        let init = self.lab.init_process("n1").unwrap();
        let socket = format!("/proc/{init}/root/run/holdfast/control.sock");
        let client = BlockingControlClient::new(Path::new(&socket)).unwrap();
        let [a, _] = self.service_addresses();
        let request = ServiceChangeRequest {
            id: None,
            change: ServiceChange::Add(NewService {
                name: "echo".to_owned(),
                addresses: vec![a.into()],
                port: PORT,
                protocol: Protocol::Tcp,
                settings: ServiceSettings::default(),
            }),
        };
        eventually("group a serves", || {
            let added = client.run(|client| client.change_services(&request));
            added.is_ok()
        });
    }

    /// Returns what `dig` prints at the client about these questions.
    fn dig(&self, server: &str, arguments: &[&str]) -> String {
        let mut dig = self.lab.command("c1").unwrap();
        dig.args(["dig", "+tries=2", "+time=2"])
            .arg(format!("@{}", self.address(server)))
            .args(arguments);
        String::from_utf8(dig.output().unwrap().stdout).unwrap()
    }

    /// Returns the first lines of `count` answers.
    fn addresses(&self, server: &str, name: &str, count: usize) -> Vec<Vec<Ipv4Addr>> {
        let question = [name, "A"];
        let mut arguments = vec!["+noall", "+answer"];
        arguments.extend(question.iter().cycle().take(2 * count));
        let text = self.dig(server, &arguments);
        // A blank line or none stands between the answers, so that each has as many lines as the first one.
        let records: Vec<Ipv4Addr> = (text.lines())
            .filter_map(|line| line.split_whitespace().last()?.parse().ok())
            .collect();
        let each = (records.len() / count).max(1);
        records.chunks(each).map(<[Ipv4Addr]>::to_vec).collect()
    }
}

impl Drop for TwoGroups {
    fn drop(&mut self) {
        for program in self.daemons.iter_mut().chain(self.servers.values_mut()) {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

fn eventually(awaited: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(
            Instant::now() < deadline,
            "not within {PATIENCE:?}: {awaited}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn answers_have_contact_nodes_of_both_groups_as_long_as_they_serve() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a lab needs root");
        return;
    }
    let mut groups = TwoGroups::up();
    groups.add_service();
    let [a, b] = groups.service_addresses();
    let (www, heavy) = ("www.example.test", "heavy.example.test");
    for server in ["n2", "n3"] {
        eventually("both groups are in answers", || {
            let mut answers = groups.addresses(server, www, 1);
            answers.iter_mut().for_each(|addresses| addresses.sort());
            answers == [[a, b]]
        });
        // The addresses take turns at the first place.
        let firsts: Vec<Ipv4Addr> = (groups.addresses(server, www, 4).iter())
            .map(|addresses| addresses[0])
            .collect();
        assert!(
            firsts == [a, b, a, b] || firsts == [b, a, b, a],
            "{firsts:?}"
        );
        let weighted = groups.addresses(server, heavy, 400);
        let of_a = weighted
            .iter()
            .filter(|addresses| **addresses == [a])
            .count();
        assert_eq!(weighted.len(), 400);
        assert!((250..350).contains(&of_a), "{of_a} of 400, expected 300");
    }
    // Each group also has its own service as a name.
    assert_eq!(groups.addresses("n2", "echo.example.test", 1), [[a]]);
    assert_eq!(groups.addresses("n3", "ECHO.example.test", 1), [[b]]);
    let services = groups.dig(
        "n2",
        &["+short", "+tcp", "_echo._tcp.heavy.example.test", "SRV"],
    );
    let host = a.to_string().replace('.', "-");
    assert!(
        services.contains(&format!("0 3 {PORT} {host}.heavy.example.test.")),
        "{services}"
    );
    let missing = groups.dig("n2", &["nothing.example.test", "A"]);
    assert!(
        missing.contains("status: NXDOMAIN") && missing.contains("SOA"),
        "{missing}"
    );
    let other = groups.dig("n2", &["example.org", "A"]);
    assert!(other.contains("status: REFUSED"), "{other}");

    groups.run_in_host("n3", &["ip", "link", "set", "eth0", "down"]);
    let since = Instant::now();
    eventually(
        "the group whose contact node is cut off is in no answer",
        || groups.addresses("n2", www, 1) == [[a]],
    );
    let elapsed = since.elapsed();
    assert!(elapsed < REMOVAL_TIME, "{elapsed:?}");
    println!("an address without a host is in no answer after {elapsed:?}");

    // The node that is asked is not the contact node, and still learns that nobody serves.
    for node in ["n1", "n2"] {
        let server = groups.servers.get_mut(node).unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
    }
    eventually("no address is in answers", || {
        let answer = groups.dig("n2", &[www, "A"]);
        answer.contains("status: SERVFAIL")
    });
    let mut server = groups.lab.command("n2").unwrap();
    server.args(["perl", "-MIO::Socket::INET", "-e", SERVER]);
    groups.servers.insert("n2", server.spawn().unwrap());
    eventually("the group serves again", || {
        groups.addresses("n2", www, 1) == [[a]]
    });
}
