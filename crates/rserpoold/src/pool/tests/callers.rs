//! Tests of a daemon with a fake endpoint that reports events as the test demands.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use holdfast_api::pool::{ElementService, RegistrationRequest};
use holdfast_sctp::{AssocId, MessageToSend, PathState, TransportEndpoint, TransportEvent};
use holdfast_wire::rserpool::asap::{self, Message as Asap};
use holdfast_wire::rserpool::{ElementId, PoolHandle, RegistrarId, Transport, TransportUse};
use nix::sys::eventfd::EventFd;
use tokio::runtime::{Builder, Runtime};

use super::super::hosted_elements::HostedElement;
use super::super::unconfirmed_callers::CONFIRMATION_TIMEOUT;
use super::*;
use crate::config::pool::PoolConfig;
use crate::mailbox::mailbox;
use crate::multicast::MulticastGroups;

/// The endpoint's knowledge of associations: confirmed addresses, and all addresses that the other side claims.
#[derive(Default)]
struct FakeState {
    confirmed: HashMap<AssocId, Vec<SocketAddr>>,
    claimed: HashMap<AssocId, Vec<SocketAddr>>,
    dialled: Vec<(AssocId, Vec<SocketAddr>)>,
    aborted: Vec<AssocId>,
    sent: Vec<(AssocId, Bytes)>,
}

struct FakeEndpoint {
    state: Arc<Mutex<FakeState>>,
    fd: EventFd,
}

impl TransportEndpoint for FakeEndpoint {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn recv_batch(&mut self, _: &mut Vec<TransportEvent>) -> io::Result<()> {
        Ok(())
    }

    fn send(&mut self, assoc: AssocId, message: &MessageToSend) -> io::Result<()> {
        let mut state = self.state.lock().expect("no panic");
        state.sent.push((assoc, message.data.clone()));
        Ok(())
    }

    fn send_bundles(&mut self, _: &[AssocId], _: &[MessageToSend], _: &mut Vec<usize>) {}

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn connect(&mut self, remote: &[SocketAddr], _: Option<u16>) -> io::Result<AssocId> {
        let mut state = self.state.lock().expect("no panic");
        let assoc = AssocId(state.dialled.len() as u64 + 1);
        state.dialled.push((assoc, remote.to_vec()));
        Ok(assoc)
    }

    fn connect_from_new_port(
        &mut self,
        remote: &[SocketAddr],
        to: Option<u16>,
    ) -> io::Result<AssocId> {
        self.connect(remote, to)
    }

    fn round_trip(&self, _: AssocId) -> io::Result<Duration> {
        Ok(Duration::ZERO)
    }

    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        let state = self.state.lock().expect("no panic");
        Ok(state.claimed[&assoc].clone())
    }

    fn confirmed_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        let state = self.state.lock().expect("no panic");
        Ok(state.confirmed[&assoc].clone())
    }

    fn local_addresses(&self) -> io::Result<Vec<SocketAddr>> {
        Ok(Vec::new())
    }

    fn encapsulation_port(&self) -> Option<u16> {
        None
    }

    fn is_raw(&self) -> bool {
        true
    }

    fn shutdown(&mut self, _: AssocId) -> io::Result<()> {
        Ok(())
    }

    fn abort(&mut self, assoc: AssocId) -> io::Result<()> {
        let mut state = self.state.lock().expect("no panic");
        state.aborted.push(assoc);
        Ok(())
    }
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

const REGISTRARS: [&str; 2] = ["10.0.0.1:3863", "10.0.0.2:3863"];
const ELEMENT: u64 = 7;

/// A daemon that knows two registrars, with an element that is connected to one of them.
struct TestDaemon {
    daemon: PoolEventLoop,
    state: Arc<Mutex<FakeState>>,
    _runtime: Runtime,
}

impl TestDaemon {
    fn new() -> TestDaemon {
        TestDaemon::with_config("")
    }

    /// Creates the daemon with additional configuration.
    fn with_config(extra_config: &str) -> TestDaemon {
        let text = format!("[pool]\nregistrars = {REGISTRARS:?}\n{extra_config}");
        let config = PoolConfig::parse(Path::new("pool.toml"), &text).expect("a configuration");
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        let state = Arc::new(Mutex::new(FakeState::default()));
        let fd = EventFd::new().expect("a descriptor");
        let endpoint = Box::new(FakeEndpoint {
            state: state.clone(),
            fd,
        });
        let groups = MulticastGroups::join(&[], &[]).expect("no group");
        let mail = mailbox().expect("a descriptor");
        let daemon = PoolEventLoop::new(&config, endpoint, groups, mail, runtime.handle().clone());
        let mut bench = TestDaemon {
            daemon,
            state,
            _runtime: runtime,
        };
        let service = ElementService::Tcp(address("10.0.0.7:80"));
        let registration = RegistrationRequest::new("web", service);
        bench
            .daemon
            .register(ELEMENT, registration)
            .expect("an element");
        let dialled = bench.state.lock().expect("no panic").dialled.clone();
        // The first registrar that answers is asked; the other attempts are ended.
        let (first, addresses) = dialled.first().expect("a registrar is called");
        bench.association_up(*first, addresses, addresses);
        bench.state.lock().expect("no panic").aborted.clear();
        bench
    }

    fn association_up(&mut self, assoc: AssocId, confirmed: &[SocketAddr], claimed: &[SocketAddr]) {
        let mut state = self.state.lock().expect("no panic");
        state.confirmed.insert(assoc, confirmed.to_vec());
        state.claimed.insert(assoc, claimed.to_vec());
        drop(state);
        self.handle_event(TransportEvent::Up {
            assoc,
            outbound_streams: 1,
            inbound_streams: 1,
        });
    }

    fn handle_event(&mut self, event: TransportEvent) {
        self.daemon.on_endpoint_event(0, event);
        self.daemon.process_inputs();
    }

    fn receive_message(&mut self, assoc: AssocId, message: &Asap) {
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes).expect("it fits");
        let message = MessageToSend::new(asap::PPID, bytes.freeze());
        self.handle_event(TransportEvent::Message { assoc, message });
    }

    /// Delivers a keep-alive from a registrar that wants to be the element's home.
    fn receive_keep_alive(&mut self, assoc: AssocId, registrar: RegistrarId) {
        let message = Asap::EndpointKeepAlive {
            home: true,
            registrar,
            handle: PoolHandle(b"web".as_slice().into()),
            id: None,
        };
        self.receive_message(assoc, &message);
    }

    /// Delivers `times` probes for the element, or for one that does not exist.
    fn send_probes(&mut self, assoc: AssocId, times: usize, exists: bool) {
        let element_id = self.element().machine.id();
        let probe = Asap::Probe {
            handle: PoolHandle::from("web"),
            id: ElementId(element_id.0 ^ u32::from(!exists)),
        };
        for _ in 0..times {
            self.receive_message(assoc, &probe);
        }
    }

    /// Returns the sent answers to probes.
    fn probe_answers(&self, assoc: AssocId) -> Vec<(u32, Option<u32>)> {
        let state = self.state.lock().expect("no panic");
        let sent = state.sent.iter().filter(|(to, _)| *to == assoc);
        let answer = |bytes: &Bytes| match Asap::parse(bytes).expect("ours").message {
            Asap::ProbeAnswer {
                in_flight,
                latency_us,
                ..
            } => (in_flight, latency_us),
            other => panic!("{other:?}"),
        };
        sent.map(|(_, bytes)| answer(bytes)).collect()
    }

    fn element(&self) -> &HostedElement {
        self.daemon.elements.get(ELEMENT).expect("it is there")
    }

    fn home(&self) -> Option<RegistrarId> {
        self.element().machine.home()
    }

    fn aborted(&self) -> Vec<AssocId> {
        self.state.lock().expect("no panic").aborted.clone()
    }
}

const IMPOSTOR: RegistrarId = RegistrarId(0xbad);
const CALLER: AssocId = AssocId(100);

#[test]
fn caller_with_unconfirmed_registrar_address_is_no_registrar() {
    let mut bench = TestDaemon::new();
    let before = bench.home();
    let caller_address = address("10.0.0.9:3863");
    let claimed = [
        caller_address,
        address(REGISTRARS[0]),
        address(REGISTRARS[1]),
    ];
    bench.association_up(CALLER, &[caller_address], &claimed);
    bench.receive_keep_alive(CALLER, IMPOSTOR);
    assert_eq!(bench.home(), before);
    // A lookup of the registrar's address finds the registrar or nothing, never the caller.
    for registrar in REGISTRARS {
        let link = bench.daemon.links.find(&[address(registrar)]);
        assert_ne!(link.map(|(assoc_key, _)| assoc_key.assoc), Some(CALLER));
    }
    assert_eq!(bench.aborted(), []);
    bench.daemon.started -= CONFIRMATION_TIMEOUT;
    bench.daemon.expire_callers();
    assert_eq!((bench.aborted(), bench.home()), (vec![CALLER], before));
    assert_eq!(bench.daemon.pending_callers.next_deadline(), None);
}

#[test]
fn caller_is_a_registrar_once_its_address_is_confirmed() {
    let mut bench = TestDaemon::new();
    let (other, configured) = (address("10.1.0.2:3863"), address(REGISTRARS[1]));
    bench.association_up(CALLER, &[other], &[other, configured]);
    let registrar = RegistrarId(2);
    bench.receive_keep_alive(CALLER, registrar);
    assert_ne!(bench.home(), Some(registrar), "but it may be anybody");
    let confirmed = vec![other, configured];
    let mut state = bench.state.lock().expect("no panic");
    state.confirmed.insert(CALLER, confirmed);
    drop(state);
    bench.handle_event(TransportEvent::Path {
        assoc: CALLER,
        address: configured,
        state: PathState::Confirmed,
    });
    assert_eq!(bench.home(), Some(registrar));
    let link = bench.daemon.links.find(&[configured]);
    assert_eq!(link.map(|(assoc_key, _)| assoc_key.assoc), Some(CALLER));
    bench.daemon.started -= CONFIRMATION_TIMEOUT;
    bench.daemon.expire_callers();
    assert_eq!(bench.aborted(), []);
}

#[test]
fn caller_without_permission_is_refused() {
    let mut bench = TestDaemon::with_config("[access]\nprobe = [\"10.0.0.8\"]\n");
    let before = bench.home();
    let caller_address = address("10.0.0.9:3863");
    bench.association_up(
        CALLER,
        &[caller_address],
        &[caller_address, address("10.0.0.8:3863")],
    );
    assert_eq!(bench.aborted(), [CALLER]);
    // Messages that arrive with the association are not handled either.
    bench.receive_keep_alive(CALLER, IMPOSTOR);
    bench.send_probes(CALLER, 1, true);
    assert_eq!(
        (bench.home(), bench.probe_answers(CALLER)),
        (before, vec![])
    );
}

/// An element at a port of this host, whose connections can be counted, and a guest.
fn bench_with_guest() -> (TestDaemon, TcpListener) {
    let mut bench = TestDaemon::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let listener_address = listener.local_addr().expect("an address");
    let element = bench.daemon.elements.get_mut(ELEMENT).expect("it is there");
    element.transport = Transport::Tcp {
        port: listener_address.port(),
        usage: TransportUse::DataOnly,
        address: listener_address.ip(),
    };
    let guest = address("10.0.0.9:3863");
    bench.association_up(CALLER, &[guest], &[guest]);
    assert_eq!(bench.aborted(), []);
    (bench, listener)
}

#[test]
fn guest_probe_returns_connection_count() {
    let (mut bench, listener) = bench_with_guest();
    let _users = [(); 3].map(|()| TcpStream::connect(listener.local_addr().expect("it has")));
    bench.send_probes(CALLER, 1, true);
    bench.send_probes(CALLER, 1, false);
    assert_eq!(bench.probe_answers(CALLER), [(3, None)]);
    // Without a listener there is no answer, once the last count is too old.
    drop(listener);
    bench.daemon.started -= Duration::from_secs(60);
    bench.send_probes(CALLER, 1, true);
    assert_eq!(bench.probe_answers(CALLER), [(3, None)]);
}

#[test]
fn guest_that_misbehaves_is_disconnected() {
    let before = {
        let (mut bench, _listener) = bench_with_guest();
        let mut probes = 0;
        while bench.aborted().is_empty() {
            bench.send_probes(CALLER, 1_000, true);
            probes += 1_000;
        }
        // Ten seconds' worth of probes was tolerated, and the first second's worth was answered.
        let answers = bench.probe_answers(CALLER).len();
        assert!(
            probes > 10_000 && answers < probes - 9_000,
            "{answers} of {probes}"
        );
        bench.home()
    };
    for is_data in [false, true] {
        let (mut bench, _listener) = bench_with_guest();
        match is_data {
            false => bench.receive_keep_alive(CALLER, IMPOSTOR),
            true => bench.handle_event(TransportEvent::Message {
                assoc: CALLER,
                message: MessageToSend::new(0, Bytes::from_static(b"data")),
            }),
        }
        assert_eq!((bench.aborted(), bench.home()), (vec![CALLER], before));
        // Messages from the guest until the end of its association are ignored too.
        bench.receive_keep_alive(CALLER, IMPOSTOR);
        assert_eq!(bench.home(), before);
    }
}

#[test]
fn guests_are_limited_and_idle_ones_disconnected() {
    let (mut bench, _listener) = bench_with_guest();
    let guest = address("10.0.0.9:3863");
    for number in 1..100 {
        bench.association_up(AssocId(CALLER.0 + number), &[guest], &[guest]);
    }
    assert_eq!(bench.aborted().len(), 100 - 64);
    bench.state.lock().expect("no panic").aborted.clear();
    bench.daemon.started -= Duration::from_secs(40);
    bench.send_probes(CALLER, 1, true);
    bench.daemon.started -= Duration::from_secs(40);
    bench.daemon.expire_guests();
    let aborted = bench.aborted();
    assert_eq!(aborted.len(), 63);
    assert!(!aborted.contains(&CALLER));
}
