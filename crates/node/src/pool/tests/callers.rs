//! A daemon on an endpoint that says what the test wants.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};

use bytes::BytesMut;
use holdfast_api::pool::{Registration, Service};
use holdfast_sys::transport::{AssocId, Endpoint, Event, Message, PathState};
use holdfast_wire::rserpool::asap::{self, Message as Asap};
use holdfast_wire::rserpool::{PoolHandle, RegistrarId};
use nix::sys::eventfd::EventFd;
use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::config::pool::PoolConfig;
use crate::mailbox::mailbox;
use crate::multicast::Groups;

/// What the endpoint knows of associations: addresses that it has confirmed, and all that the other side says.
#[derive(Default)]
struct Known {
    confirmed: HashMap<AssocId, Vec<SocketAddr>>,
    said: HashMap<AssocId, Vec<SocketAddr>>,
    begun: Vec<(AssocId, Vec<SocketAddr>)>,
    aborted: Vec<AssocId>,
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

    fn send(&mut self, _: AssocId, _: &Message) -> io::Result<()> {
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

/// A daemon that knows two registrars, with an element that has asked one of them.
struct Bench {
    daemon: Daemon,
    known: Arc<Mutex<Known>>,
    _runtime: Runtime,
}

impl Bench {
    fn new() -> Bench {
        let text = format!("[pool]\nregistrars = {REGISTRARS:?}\n");
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
        // The first that answers is asked; others are let go.
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

    /// A keep-alive comes that wants to be the home of the element.
    fn asked_to_follow(&mut self, assoc: AssocId, registrar: RegistrarId) {
        let mut bytes = BytesMut::new();
        let message = Asap::EndpointKeepAlive {
            home: true,
            registrar,
            handle: PoolHandle(b"web".as_slice().into()),
            id: None,
        };
        message.encode(&mut bytes).expect("it fits");
        let message = Message::new(asap::PPID, bytes.freeze());
        self.happens(Event::Message { assoc, message });
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
    // Who calls the registrar finds the registrar, or calls.
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
    let mut bench = Bench::new();
    let own = at("10.0.0.9:3863");
    bench.up(CALLER, &[own], &[own, at("10.0.0.8:3863")]);
    assert_eq!(bench.aborted(), [CALLER]);
}
