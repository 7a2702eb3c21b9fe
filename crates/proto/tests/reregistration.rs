//! A registrar's and an element's machine, with the link between them played by the test: a live element that was
//! removed learns of the removal long before its next regular registration.

use bytes::BytesMut;
use holdfast_proto::pool_element::{self, LinkOutput, PoolElement, ServerHuntConfig};
use holdfast_proto::registrar::{self, AssociationId, Output, PoolProtocol, Registrar};
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
struct RegistrarAndElement {
    now: Duration,
    registrar: Registrar,
    element: PoolElement,
    link: Option<pool_element::LinkId>,
    /// True if the element's messages are lost.
    drops_element_messages: bool,
}

impl RegistrarAndElement {
    fn new() -> RegistrarAndElement {
        let config =
            registrar::RegistrarMachineConfig::new(RegistrarId(7), 1, sctp([10, 0, 0, 1], 9901));
        let service = Transport::Tcp {
            port: 80,
            usage: TransportUse::DataOnly,
            address: [10, 0, 0, 2].into(),
        };
        let hunt = ServerHuntConfig::new(vec![Transport::Sctp(sctp([10, 0, 0, 1], 3863))]);
        let handle = PoolHandle::from("pool");
        let mut element = pool_element::PoolElementConfig::new(
            handle,
            service,
            Policy::RoundRobin,
            hunt,
            [3; 32],
        );
        element.life_unit = pool_element::LifeUnit::Milliseconds;
        let mut pair = RegistrarAndElement {
            now: Duration::ZERO,
            registrar: Registrar::new(Duration::ZERO, config),
            element: PoolElement::new(element),
            link: None,
            drops_element_messages: false,
        };
        pair.element.handle_register(Duration::ZERO);
        pair
    }

    /// Passes messages on until there are none.
    fn exchange_messages(&mut self) {
        loop {
            if let Some(output) = self.registrar.poll_output() {
                self.deliver_from_registrar(output);
            } else if let Some(output) = self.element.poll_output() {
                self.deliver_from_element(output);
            } else {
                return;
            }
        }
    }

    fn deliver_from_registrar(&mut self, output: Output) {
        if let (Output::Send { message, .. }, Some(link)) = (output, self.link) {
            let message = Message::parse(&message).expect("a message").message;
            self.element.handle_message(self.now, link, message);
        }
    }

    fn deliver_from_element(&mut self, output: pool_element::Output) {
        match output {
            LinkOutput::Connect { link, .. } => {
                let at = SocketAddr::from(([10, 0, 0, 2], 5000));
                let (now, registrar) = (self.now, &mut self.registrar);
                registrar.handle_association_up(now, ASSOCIATION, PoolProtocol::Asap, &[at], None);
                self.link = Some(link);
                self.element.handle_connected(now, link);
            }
            LinkOutput::Send { message, .. } if !self.drops_element_messages => {
                let mut bytes = BytesMut::new();
                message.encode(&mut bytes).expect("an encoding");
                let bytes = bytes.freeze();
                self.registrar.handle_asap(self.now, ASSOCIATION, &bytes);
            }
            LinkOutput::Close { .. } => panic!("unexpected end of the link"),
            LinkOutput::Send { .. } | LinkOutput::Event(_) => {}
        }
    }

    /// Lets time pass until `condition` returns true; panics after `limit`.
    fn advance_until(
        &mut self,
        limit: Duration,
        condition: impl Fn(&Registrar) -> bool,
    ) -> Duration {
        let start = self.now;
        self.exchange_messages();
        while !condition(&self.registrar) {
            let due = [self.registrar.poll_timeout(), self.element.poll_timeout()];
            let due = due.into_iter().flatten().min().expect("a timer");
            self.now = self.now.max(due);
            assert!(
                self.now - start <= limit,
                "condition not met within {limit:?}"
            );
            if self.registrar.poll_timeout().is_some_and(|at| at <= due) {
                self.registrar.handle_timeout(self.now);
            } else {
                self.element.handle_timeout(self.now);
            }
            self.exchange_messages();
        }
        self.now - start
    }
}

#[test]
fn removed_live_element_reregisters_at_once() {
    let mut pair = RegistrarAndElement::new();
    let has_element = |registrar: &Registrar| registrar.elements() == 1;
    let has_no_element = |registrar: &Registrar| registrar.elements() == 0;
    pair.advance_until(Duration::from_secs(1), has_element);
    pair.drops_element_messages = true;
    // A keep-alive's interval, and the time for its answer.
    pair.advance_until(Duration::from_secs(60), has_no_element);
    pair.drops_element_messages = false;
    let absent = pair.advance_until(Duration::from_secs(1), has_element);
    println!("element not registered for {absent:?}");
    assert!(pair.element.is_registered());
}
