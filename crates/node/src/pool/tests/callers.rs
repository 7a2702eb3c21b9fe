//! Tests of a daemon with a fake endpoint that reports events as the test demands.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use holdfast_api::pool::{Registration, Service};
use holdfast_sys::transport::{AssocId, Endpoint, Event, Message, PathState};
use holdfast_wire::rserpool::asap::{self, Message as Asap};
use holdfast_wire::rserpool::{ElementId, PoolHandle, RegistrarId, Transport, TransportUse};
use nix::sys::eventfd::EventFd;
use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::config::pool::PoolConfig;
use crate::mailbox::mailbox;
use crate::multicast::Groups;

/// The endpoint's knowledge of associations: confirmed addresses, and all addresses that the other side claims.
#[derive(Default)]
struct Known {
    confirmed: HashMap<AssocId, Vec<SocketAddr>>,
    said: HashMap<AssocId, Vec<SocketAddr>>,
    begun: Vec<(AssocId, Vec<SocketAddr>)>,
    aborted: Vec<AssocId>,
    sent: Vec<(AssocId, Bytes)>,
}

struct Faked {
    known: Arc<Mutex<Known>>,
    fd: EventFd,
}

impl Endpoint for Faked {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn recv_batch(&mut self, _: &mut Vec<Event>) -> io::Result<()> {
        Ok(())
    }

    fn send(&mut self, assoc: AssocId, message: &Message) -> io::Result<()> {
        let mut known = self.known.lock().expect("no panic");
        known.sent.push((assoc, message.data.clone()));
        Ok(())
    }

    fn send_bundles(&mut self, _: &[AssocId], _: &[Message], _: &mut Vec<usize>) {}

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn connect(&mut self, remote: &[SocketAddr], _: Option<u16>) -> io::Result<AssocId> {
        let mut known = self.known.lock().expect("no panic");
        let assoc = AssocId(known.begun.len() as u64 + 1);
        known.begun.push((assoc, remote.to_vec()));
        Ok(assoc)
    }

    fn connect_apart(&mut self, remote: &[SocketAddr], to: Option<u16>) -> io::Result<AssocId> {
        self.connect(remote, to)
    }

    fn round_trip(&self, _: AssocId) -> io::Result<Duration> {
        Ok(Duration::ZERO)
    }

    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        let known = self.known.lock().expect("no panic");
        Ok(known.said[&assoc].clone())
    }

    fn confirmed_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        let known = self.known.lock().expect("no panic");
        Ok(known.confirmed[&assoc].clone())
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
        let mut known = self.known.lock().expect("no panic");
        known.aborted.push(assoc);
        Ok(())
    }
}

fn at(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

const REGISTRARS: [&str; 2] = ["10.0.0.1:3863", "10.0.0.2:3863"];
const ELEMENT: u64 = 7;

/// A daemon that knows two registrars, with an element that is connected to one of them.
struct Bench {
    daemon: Daemon,
    known: Arc<Mutex<Known>>,
    _runtime: Runtime,
}

impl Bench {
    fn new() -> Bench {
        Bench::with("")
    }

    /// Creates the daemon with additional configuration.
    fn with(more: &str) -> Bench {
        let text = format!("[pool]\nregistrars = {REGISTRARS:?}\n{more}");
        let config = PoolConfig::parse(Path::new("pool.toml"), &text).expect("a configuration");
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        let known = Arc::new(Mutex::new(Known::default()));
        let fd = EventFd::new().expect("a descriptor");
        let own = Box::new(Faked {
            known: known.clone(),
            fd,
        });
        let groups = Groups::join(&[], &[]).expect("no group");
        let mail = mailbox().expect("a descriptor");
        let daemon = Daemon::new(&config, own, groups, mail, runtime.handle().clone());
        let mut bench = Bench {
            daemon,
            known,
            _runtime: runtime,
        };
        let service = Service::Tcp(at("10.0.0.7:80"));
        let wanted = Registration::new("web", service);
        bench.daemon.register(ELEMENT, wanted).expect("an element");
        let begun = bench.known.lock().expect("no panic").begun.clone();
        // The first registrar that answers is asked; the other attempts are ended.
        let (first, addresses) = begun.first().expect("a registrar is called");
        bench.up(*first, addresses, addresses);
        bench.known.lock().expect("no panic").aborted.clear();
        bench
    }

    fn up(&mut self, assoc: AssocId, confirmed: &[SocketAddr], said: &[SocketAddr]) {
        let mut known = self.known.lock().expect("no panic");
        known.confirmed.insert(assoc, confirmed.to_vec());
        known.said.insert(assoc, said.to_vec());
        drop(known);
        self.happens(Event::Up {
            assoc,
            outbound_streams: 1,
            inbound_streams: 1,
        });
    }

    fn happens(&mut self, event: Event) {
        self.daemon.take_in(0, event);
        self.daemon.settle();
    }

    fn said(&mut self, assoc: AssocId, message: &Asap) {
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes).expect("it fits");
        let message = Message::new(asap::PPID, bytes.freeze());
        self.happens(Event::Message { assoc, message });
    }

    /// Delivers a keep-alive from a registrar that wants to be the element's home.
    fn asked_to_follow(&mut self, assoc: AssocId, registrar: RegistrarId) {
        let message = Asap::EndpointKeepAlive {
            home: true,
            registrar,
            handle: PoolHandle(b"web".as_slice().into()),
            id: None,
        };
        self.said(assoc, &message);
    }

    /// Delivers `times` probes for the element, or for one that does not exist.
    fn probed(&mut self, assoc: AssocId, times: usize, is_there: bool) {
        let own = self.daemon.elements[&ELEMENT].machine.id();
        let probe = Asap::Probe {
            handle: PoolHandle::from("web"),
            id: ElementId(own.0 ^ u32::from(!is_there)),
        };
        for _ in 0..times {
            self.said(assoc, &probe);
        }
    }

    /// Returns the sent answers to probes.
    fn answers(&self, assoc: AssocId) -> Vec<(u32, Option<u32>)> {
        let known = self.known.lock().expect("no panic");
        let sent = known.sent.iter().filter(|(to, _)| *to == assoc);
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

    fn home(&self) -> Option<RegistrarId> {
        self.daemon.elements[&ELEMENT].machine.home()
    }

    fn aborted(&self) -> Vec<AssocId> {
        self.known.lock().expect("no panic").aborted.clone()
    }
}

const THIEF: RegistrarId = RegistrarId(0xbad);
const CALLER: AssocId = AssocId(100);

#[test]
fn whoever_lists_a_registrar_s_address_is_none() {
    let mut bench = Bench::new();
    let before = bench.home();
    let own = at("10.0.0.9:3863");
    let said = [own, at(REGISTRARS[0]), at(REGISTRARS[1])];
    bench.up(CALLER, &[own], &said);
    bench.asked_to_follow(CALLER, THIEF);
    assert_eq!(bench.home(), before);
    // A lookup of the registrar's address finds the registrar or nothing, never the caller.
    for registrar in REGISTRARS {
        let found = bench.daemon.links.find(&[at(registrar)]);
        assert_ne!(found.map(|(place, _)| place.assoc), Some(CALLER));
    }
    assert_eq!(bench.aborted(), []);
    bench.daemon.started -= CONFIRMATION;
    bench.daemon.end_callers();
    assert_eq!((bench.aborted(), bench.home()), (vec![CALLER], before));
    assert_eq!(bench.daemon.callers.next(), None);
}

#[test]
fn a_registrar_is_one_when_its_address_is_confirmed() {
    let mut bench = Bench::new();
    let (other, configured) = (at("10.1.0.2:3863"), at(REGISTRARS[1]));
    bench.up(CALLER, &[other], &[other, configured]);
    let registrar = RegistrarId(2);
    bench.asked_to_follow(CALLER, registrar);
    assert_ne!(bench.home(), Some(registrar), "but it may be anybody");
    let confirmed = vec![other, configured];
    let mut known = bench.known.lock().expect("no panic");
    known.confirmed.insert(CALLER, confirmed);
    drop(known);
    bench.happens(Event::Path {
        assoc: CALLER,
        address: configured,
        state: PathState::Confirmed,
    });
    assert_eq!(bench.home(), Some(registrar));
    let found = bench.daemon.links.find(&[configured]);
    assert_eq!(found.map(|(place, _)| place.assoc), Some(CALLER));
    bench.daemon.started -= CONFIRMATION;
    bench.daemon.end_callers();
    assert_eq!(bench.aborted(), []);
}

#[test]
fn somebody_else_is_not_let_in_at_all() {
    let mut bench = Bench::with("[access]\nprobe = [\"10.0.0.8\"]\n");
    let before = bench.home();
    let own = at("10.0.0.9:3863");
    bench.up(CALLER, &[own], &[own, at("10.0.0.8:3863")]);
    assert_eq!(bench.aborted(), [CALLER]);
    // Messages that arrive with the association are not handled either.
    bench.asked_to_follow(CALLER, THIEF);
    bench.probed(CALLER, 1, true);
    assert_eq!((bench.home(), bench.answers(CALLER)), (before, vec![]));
}

/// An element at a port of this host, whose connections can be counted, and a guest.
fn guest() -> (Bench, TcpListener) {
    let mut bench = Bench::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = listener.local_addr().expect("an address");
    let element = bench
        .daemon
        .elements
        .get_mut(&ELEMENT)
        .expect("it is there");
    element.at = Transport::Tcp {
        port: own.port(),
        usage: TransportUse::DataOnly,
        address: own.ip(),
    };
    let guest = at("10.0.0.9:3863");
    bench.up(CALLER, &[guest], &[guest]);
    assert_eq!(bench.aborted(), []);
    (bench, listener)
}

#[test]
fn a_guest_is_told_how_many_connections_a_server_has() {
    let (mut bench, listener) = guest();
    let _users = [(); 3].map(|()| TcpStream::connect(listener.local_addr().expect("it has")));
    bench.probed(CALLER, 1, true);
    bench.probed(CALLER, 1, false);
    assert_eq!(bench.answers(CALLER), [(3, None)]);
    // Without a listener there is no answer, once the last count is too old.
    drop(listener);
    bench.daemon.started -= Duration::from_secs(60);
    bench.probed(CALLER, 1, true);
    assert_eq!(bench.answers(CALLER), [(3, None)]);
}

#[test]
fn a_guest_that_says_anything_else_or_far_too_much_goes() {
    let before = {
        let (mut bench, _listener) = guest();
        let mut probes = 0;
        while bench.aborted().is_empty() {
            bench.probed(CALLER, 1_000, true);
            probes += 1_000;
        }
        // Ten seconds' worth of probes was tolerated, and the first second's worth was answered.
        let answers = bench.answers(CALLER).len();
        assert!(
            probes > 10_000 && answers < probes - 9_000,
            "{answers} of {probes}"
        );
        bench.home()
    };
    for is_data in [false, true] {
        let (mut bench, _listener) = guest();
        match is_data {
            false => bench.asked_to_follow(CALLER, THIEF),
            true => bench.happens(Event::Message {
                assoc: CALLER,
                message: Message::new(0, Bytes::from_static(b"data")),
            }),
        }
        assert_eq!((bench.aborted(), bench.home()), (vec![CALLER], before));
        // Messages from the guest until the end of its association are ignored too.
        bench.asked_to_follow(CALLER, THIEF);
        assert_eq!(bench.home(), before);
    }
}

#[test]
fn guests_are_limited_and_idle_ones_go() {
    let (mut bench, _listener) = guest();
    let guest = at("10.0.0.9:3863");
    for number in 1..100 {
        bench.up(AssocId(CALLER.0 + number), &[guest], &[guest]);
    }
    assert_eq!(bench.aborted().len(), 100 - 64);
    bench.known.lock().expect("no panic").aborted.clear();
    bench.daemon.started -= Duration::from_secs(40);
    bench.probed(CALLER, 1, true);
    bench.daemon.started -= Duration::from_secs(40);
    bench.daemon.end_guests();
    let aborted = bench.aborted();
    assert_eq!(aborted.len(), 63);
    assert!(!aborted.contains(&CALLER));
}
