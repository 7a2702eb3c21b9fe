//! Outputs and events of the machines.

use crate::fault::Fault;
use crate::machines::read_state;
use crate::world::{Packet, World, WorldEvent};
use holdfast_proto::pool_element::{self, LinkOutput as Output, UserSessionEvent};
use holdfast_proto::pool_user;
use holdfast_sim::Time;
use holdfast_sim::associations::AssociationWorld;
use holdfast_sim::pools::node_numbers::NodeRole;
use holdfast_wire::rserpool::asap::Message;

impl World {
    /// Carries out a machine's outputs, and sets its next wake-up.
    pub fn carry_out_outputs(&mut self, node: NodeRole) {
        let before = self.number_of_outputs();
        match node {
            NodeRole::Element(index) => {
                while let Some(output) = self.elements[index].machine.poll_output() {
                    self.carry_out(node, output, World::on_element_event);
                }
                while let Some(output) = self.elements[index].sessions.poll_output() {
                    self.carry_out(node, output, World::on_session_event);
                }
                let element = &mut self.elements[index];
                let wake = element.timer.arm(element.machine.poll_timeout());
                self.schedule_wake(node, wake);
            }
            NodeRole::User(index) => {
                while let Some(output) = self.users[index].machine.poll_output() {
                    self.carry_out(node, output, World::on_user_event);
                }
                let user = &mut self.users[index];
                let wake = user.timer.arm(user.machine.poll_timeout());
                self.schedule_wake(node, wake);
            }
            NodeRole::Registrar(_) => {}
        }
        let outputs = self.number_of_outputs() - before;
        assert!(
            outputs < 200,
            "{node:?} produced {outputs} outputs for one input"
        );
    }

    fn number_of_outputs(&self) -> u64 {
        self.tally.get("output").copied().unwrap_or(0)
    }

    fn schedule_wake(&mut self, node: NodeRole, wake: Option<Time>) {
        let is_stuck = match node {
            NodeRole::User(_) => self.fault == Fault::UserTimersStuck,
            _ => self.fault == Fault::ElementTimersStuck,
        };
        if let Some(at) = wake.filter(|_| !is_stuck) {
            self.queue().push(at, WorldEvent::Wake { node, at });
        }
    }

    fn carry_out<E>(
        &mut self,
        node: NodeRole,
        output: Output<E>,
        on_event: fn(&mut World, NodeRole, E),
    ) {
        self.count("output");
        match output {
            Output::Connect { link, to } => {
                self.connect(node, link, &to);
            }
            Output::Close { link } => self.close_link(node, link),
            Output::Send {
                message: Message::CookieEcho(_),
                ..
            } if self.fault == Fault::NoCookieEcho => {}
            Output::Send { link, message } => self.send(node, link, Packet::asap(&message)),
            Output::Event(event) => on_event(self, node, event),
        }
    }

    fn on_element_event(&mut self, _: NodeRole, event: pool_element::Event) {
        use pool_element::Event;
        self.count(match event {
            Event::Registered { .. } => "registered",
            Event::RegistrationRefused(refusal) => panic!("{refusal}"),
            Event::RegistrationExpired => "expired",
            Event::NewHome { .. } => "element: new home",
            Event::HomeLost => "element: home lost",
            Event::NoRegistrar => "element: no registrar",
            Event::Unanswered { .. } => "unanswered",
            Event::ErrorReported(_) => "reported",
            Event::Deregistered(_) => "left",
        });
    }

    fn on_session_event(&mut self, node: NodeRole, event: UserSessionEvent) {
        let NodeRole::Element(index) = node else {
            return;
        };
        match event {
            UserSessionEvent::Resumed { link, state } => {
                let (key, count) = read_state(&state);
                assert_eq!(
                    self.cookies.get(&key),
                    Some(&count),
                    "the latest cookie of {key:?}"
                );
                self.elements[index].counts.insert(link, count);
                self.count("resumed");
                self.trace.push((self.now, format!("resumed {count}")));
            }
            other => panic!("{other:?}"),
        }
    }

    fn on_user_event(&mut self, node: NodeRole, event: pool_user::Event) {
        use pool_user::Event;
        let NodeRole::User(index) = node else { return };
        match event {
            Event::SessionUp {
                session,
                link,
                resumed,
                ..
            } => {
                self.users[index].sessions.insert(session, Some(link));
                let known = self.cookies.contains_key(&(index, session.0));
                assert_eq!(resumed, known, "{session:?} of {node:?}");
                self.count("session up");
                self.trace.push((self.now, "up".to_owned()));
                self.send(
                    node,
                    link,
                    Packet::Request {
                        session: (index, session.0),
                    },
                );
            }
            Event::SessionBroken { session, .. } => {
                self.users[index].sessions.insert(session, None);
                self.count("session broken");
                self.trace.push((self.now, "broken".to_owned()));
            }
            Event::SessionFailed { session, .. } => {
                self.users[index].sessions.remove(&session);
                self.count("session failed");
            }
            Event::NewHome { .. } => self.count("user: new home"),
            Event::HomeLost => self.count("user: home lost"),
            Event::NoRegistrar => self.count("user: no registrar"),
            other => panic!("{other:?}"),
        }
    }
}
