//! A registrar's and an element's machine, with the link between them played by the test: a live element that was
//! removed learns of the removal long before its next regular registration.

use bytes::BytesMut;
use holdfast_proto::pool_element::{self, HuntConfig, LinkOutput, PoolElement};
use holdfast_proto::registrar::{self, AssociationId, Output, Protocol, Registrar};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{
    Policy, PoolHandle, RegistrarId, SctpTransport, Transport, TransportUse,
};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

const ASSOCIATION: AssociationId = AssociationId(1);

fn sctp(address: [u8; 4], port: u16) -> SctpTransport {
    SctpTransport {
        port,
        usage: TransportUse::DataOnly,
        addresses: [IpAddr::from(address)].into_iter().collect(),
    }
}

/// Both machines, and the link between them.
struct Pair {
    now: Duration,
    registrar: Registrar,
    element: PoolElement,
    link: Option<pool_element::Link>,
    /// True if the element's messages are lost.
    deaf: bool,
}

impl Pair {
    fn new() -> Pair {
        let config = registrar::Config::new(RegistrarId(7), 1, sctp([10, 0, 0, 1], 9901));
        let service = Transport::Tcp {
            port: 80,
            usage: TransportUse::DataOnly,
            address: [10, 0, 0, 2].into(),
        };
        let hunt = HuntConfig::new(vec![Transport::Sctp(sctp([10, 0, 0, 1], 3863))]);
        let handle = PoolHandle::from("pool");
        let mut element =
            pool_element::Config::new(handle, service, Policy::RoundRobin, hunt, [3; 32]);
        element.life_unit = pool_element::LifeUnit::Milliseconds;
        let mut pair = Pair {
            now: Duration::ZERO,
            registrar: Registrar::new(Duration::ZERO, config),
            element: PoolElement::new(element),
            link: None,
            deaf: false,
        };
        pair.element.handle_register(Duration::ZERO);
        pair
    }

    /// Passes messages on until there are none.
    fn settle(&mut self) {
        loop {
            if let Some(output) = self.registrar.poll_output() {
                self.hear_registrar(output);
            } else if let Some(output) = self.element.poll_output() {
                self.hear_element(output);
            } else {
                return;
            }
        }
    }

    fn hear_registrar(&mut self, output: Output) {
        if let (Output::Send { message, .. }, Some(link)) = (output, self.link) {
            let message = Message::parse(&message).expect("a message").message;
            self.element.handle_message(self.now, link, message);
        }
    }

    fn hear_element(&mut self, output: pool_element::Output) {
        match output {
            LinkOutput::Connect { link, .. } => {
                let at = SocketAddr::from(([10, 0, 0, 2], 5000));
                let (now, registrar) = (self.now, &mut self.registrar);
                registrar.handle_up(now, ASSOCIATION, Protocol::Asap, &[at], None);
                self.link = Some(link);
                self.element.handle_connected(now, link);
            }
            LinkOutput::Send { message, .. } if !self.deaf => {
                let mut bytes = BytesMut::new();
                message.encode(&mut bytes).expect("an encoding");
                let bytes = bytes.freeze();
                self.registrar.handle_asap(self.now, ASSOCIATION, &bytes);
            }
            LinkOutput::Close { .. } => panic!("nobody ends the link"),
            LinkOutput::Send { .. } | LinkOutput::Event(_) => {}
        }
    }

    /// Lets time pass until `look` returns true; panics after `limit`.
    fn until(&mut self, limit: Duration, look: impl Fn(&Registrar) -> bool) -> Duration {
        let begun = self.now;
        self.settle();
        while !look(&self.registrar) {
            let due = [self.registrar.poll_timeout(), self.element.poll_timeout()];
            let due = due.into_iter().flatten().min().expect("somebody waits");
            self.now = self.now.max(due);
            assert!(self.now - begun <= limit, "in vain for {limit:?}");
            if self.registrar.poll_timeout().is_some_and(|at| at <= due) {
                self.registrar.handle_timeout(self.now);
            } else {
                self.element.handle_timeout(self.now);
            }
            self.settle();
        }
        self.now - begun
    }
}

#[test]
fn an_element_that_was_taken_for_dead_is_back_in_its_pool_at_once() {
    let mut pair = Pair::new();
    let is_there = |registrar: &Registrar| registrar.elements() == 1;
    let is_gone = |registrar: &Registrar| registrar.elements() == 0;
    pair.until(Duration::from_secs(1), is_there);
    pair.deaf = true;
    // A keep-alive's interval, and the time for its answer.
    pair.until(Duration::from_secs(60), is_gone);
    pair.deaf = false;
    let absent = pair.until(Duration::from_secs(1), is_there);
    println!("absent for {absent:?}");
    assert!(pair.element.is_registered());
}
