//! Nodes with real channels and workers on loopback addresses: a revocation reaches all of them, and one renews its
//! certificate at another.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use holdfast_api::ca::CertificateAuthority;
use tokio::sync::oneshot;

use super::*;
use crate::config::Config;
use crate::peer_channel::{PeerChannel, PeerChannelOptions, PeerEvent, Peers};

/// Time limit far above any real duration; only a failing test waits so long.
const LIMIT: Duration = Duration::from_secs(60);

/// A node, served by a task.
struct LiveNode {
    config: Config,
    peers: Peers,
    credentials: Rc<RefCell<CredentialDriver>>,
    metrics: Metrics,
}

/// Makes certificates for n1 to n3, which end in `days` days, and their configurations; n1 has the authority.
fn configurations(dir: &Path, days: u32) -> Vec<Config> {
    let authority = CertificateAuthority::init(&dir.join("ca"), "web").unwrap();
    let [high, low] = ((std::process::id() as u16).wrapping_mul(37) | 0x0100).to_be_bytes();
    // Tests of one process differ in the third part.
    let low = low.wrapping_add(days as u8);
    let address = |node: u16| format!("127.{high}.{low}.{}", 100 + node);
    let peer = |node| {
        format!(
            "[[peer]]\nname = \"n{node}\"\naddress = \"{}\"\n",
            address(node)
        )
    };
    let peers: String = (1..=3).map(peer).collect();
    let config = |node: u16| {
        authority.issue(&format!("n{node}"), &[], days).unwrap();
        let joining = if node == 1 {
            "[joining]\nauthority = \"ca\"\n"
        } else {
            ""
        };
        let text = format!(
            "[node]\nname = \"n{node}\"\ninterface = \"lo\"\nstate_dir = \"{dir}/n{node}\"\n\
             [group]\nname = \"web\"\nreach = \"steer\"\ncontact = \"n2\"\n\
             [tls]\nca = \"ca/ca.pem\"\ncert = \"ca/n{node}.pem\"\nkey = \"ca/n{node}.key\"\n\
             {joining}{peers}",
            dir = dir.display()
        );
        Config::parse(&dir.join("holdfast.toml"), &text).unwrap()
    };
    (1..=3).map(config).collect()
}

/// Starts a node and serves it as the event loop does.
fn start(config: Config) -> LiveNode {
    let metrics = Metrics::new();
    let loaded = LoadedCredentials::load(&config).unwrap();
    let (worker, mut events) = CredentialWorker::start(&config, &loaded, metrics.clone()).unwrap();
    let boot = u64::from(config.node.id.0);
    let options = PeerChannelOptions::new(&config, boot, None);
    let (peers, peer_events) = PeerChannel::start(options, loaded.tls, metrics.clone()).unwrap();
    let credentials = CredentialDriver::new(&config, boot, &Rc::new(worker), &peers).unwrap();
    let credentials = Rc::new(RefCell::new(credentials));
    let node = LiveNode {
        config: config.clone(),
        peers: peers.clone(),
        credentials: credentials.clone(),
        metrics: metrics.clone(),
    };
    let start = Instant::now();
    tokio::task::spawn_local(async move {
        loop {
            tokio::select! {
                event = peer_events.recv() => {
                    let now = start.elapsed();
                    let mut credentials = credentials.borrow_mut();
                    match event {
                        PeerEvent::Up { peer, .. } => credentials.machine().handle_peer_connected(now, peer),
                        PeerEvent::Lost { peer, .. } => credentials.machine().handle_peer_lost(now, peer),
                        PeerEvent::Frame { from, frame: holdfast_wire::Frame::Credentials(frame) } => {
                            credentials.machine().handle_frame(now, from, frame);
                        }
                        PeerEvent::Frame { .. } => {}
                    }
                }
                Some(event) = events.recv() => {
                    credentials.borrow_mut().handle_event(start.elapsed(), event, &peers, &metrics);
                }
                () = tokio::time::sleep(Duration::from_millis(5)) => {
                    credentials.borrow_mut().machine().handle_timeout(start.elapsed());
                }
            }
            let name_of = |id| config.name_of(id).unwrap_or_default().to_owned();
            credentials.borrow_mut().run(&peers, &metrics, name_of);
        }
    });
    node
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[test]
fn revocation_reaches_all_nodes_and_cuts_the_revoked_one() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let nodes: Vec<LiveNode> = configurations(dir.path(), 30)
            .into_iter()
            .map(start)
            .collect();
        let is_up = |node: usize, peer: u16| nodes[node].peers.is_up(NodeId(peer));
        eventually("all are connected", || {
            is_up(0, 2) && is_up(0, 3) && is_up(1, 1) && is_up(1, 3) && is_up(2, 1) && is_up(2, 2)
        })
        .await;
        let ca = dir.path().join("ca");
        CertificateAuthority::open(&ca)
            .unwrap()
            .revoke("n3")
            .unwrap();
        // The operator gives the list to n2, which has no authority.
        let list = super::tests::list_in(&ca);
        let (reply, answer) = oneshot::channel();
        let command = WorkerCommand::ApplyList(ListSource::Operator(reply), list.into());
        nodes[1].credentials.borrow().send_to_worker(command);
        assert_eq!(answer.await.unwrap().unwrap().lists[0].number, 2);
        eventually("n1 and n2 refuse n3", || !is_up(0, 3) && !is_up(1, 3)).await;
        assert!(is_up(0, 2) && is_up(1, 1), "the others go on");
        for node in &nodes[..2] {
            let saved = LoadedCredentials::load(&node.config).unwrap();
            assert_eq!(saved.lists.lists().next().unwrap().number, 2);
        }
    });
}

#[test]
fn certificate_is_renewed_at_the_node_with_the_authority_without_a_lost_connection() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let configs = configurations(dir.path(), 7);
        let nodes: Vec<LiveNode> = configs.into_iter().map(start).collect();
        let is_up = |node: usize, peer: u16| nodes[node].peers.is_up(NodeId(peer));
        eventually("all are connected", || {
            is_up(0, 3) && is_up(1, 3) && is_up(2, 1) && is_up(2, 2)
        })
        .await;
        let before = LoadedCredentials::load(&nodes[2].config).unwrap();
        // The certificate of n3 is at its end, as far as the machine knows.
        let now = Duration::from_millis(1);
        let life = Duration::from_secs(90 * 86_400);
        nodes[2]
            .credentials
            .borrow_mut()
            .machine()
            .handle_certificate(now, now, life);
        let is_renewed = || {
            let loaded = LoadedCredentials::load(&nodes[2].config).unwrap();
            loaded.tls.own_validity().1 > before.tls.own_validity().1
        };
        // The contact node n2 has no authority, and so n1 is asked next.
        eventually("n3 has a new certificate", is_renewed).await;
        assert!(is_up(2, 1) && is_up(2, 2) && is_up(0, 3) && is_up(1, 3));
        let text = nodes[2].metrics.encode();
        let counted = "holdfast_certificate_renewals_total{outcome=\"renewed\"} 1";
        eventually("counted", || nodes[2].metrics.encode().contains(counted)).await;
        assert!(!text.contains("{outcome=\"failed\"} 1"), "{text}");
    });
}
