//! Outputs and events of the machines.

use crate::fault::Fault;
use crate::machines::read_state;
use crate::net::{Node, Packet};
use crate::world::{World, WorldEvent};
use holdfast_proto::pool_element::{self, LinkOutput as Output, UserSessionEvent};
use holdfast_proto::pool_user;
use holdfast_wire::rserpool::asap::Message;
use std::time::Duration;

impl World {
    /// Carries out a machine's outputs, and sets its next wake-up.
    pub fn carry_out_outputs(&mut self, node: Node) {
        let before = self.number_of_outputs();
        match node {
            Node::Element(index) => {
                while let Some(output) = self.elements[index].machine.poll_output() {
                    self.carry_out(node, output, World::on_element_event);
                }
                while let Some(output) = self.elements[index].sessions.poll_output() {
                    self.carry_out(node, output, World::on_session_event);
                }
                let due = self.elements[index].machine.poll_timeout();
                if std::mem::replace(&mut self.elements[index].next_wake, due) != due {
                    self.schedule_wake(node, due);
                }
            }
            Node::User(index) => {
                while let Some(output) = self.users[index].machine.poll_output() {
                    self.carry_out(node, output, World::on_user_event);
                }
                let due = self.users[index].machine.poll_timeout();
                if std::mem::replace(&mut self.users[index].next_wake, due) != due {
                    self.schedule_wake(node, due);
                }
            }
            Node::Registrar(_) => {}
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

    fn schedule_wake(&mut self, node: Node, due: Option<Duration>) {
        let is_stuck = match node {
            Node::User(_) => self.fault == Fault::UserTimersStuck,
            _ => self.fault == Fault::ElementTimersStuck,
        };
        if let Some(due) = due.filter(|_| !is_stuck) {
            self.schedule(due.saturating_sub(self.now), WorldEvent::Wake { node });
        }
    }

    fn carry_out<E>(&mut self, node: Node, output: Output<E>, on_event: fn(&mut World, Node, E)) {
        self.count("output");
        match output {
            Output::Connect { link, to } => {
                self.connect(node, link, &to);
            }
            Output::Close { link } => self.close(node, link),
            Output::Send {
                message: Message::CookieEcho(_),
                ..
            } if self.fault == Fault::NoCookieEcho => {}
            Output::Send { link, message } => self.send(node, link, Packet::asap(&message)),
            Output::Event(event) => on_event(self, node, event),
        }
    }

    fn on_element_event(&mut self, _: Node, event: pool_element::Event) {
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

    fn on_session_event(&mut self, node: Node, event: UserSessionEvent) {
        let Node::Element(index) = node else { return };
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

    fn on_user_event(&mut self, node: Node, event: pool_user::Event) {
        use pool_user::Event;
        let Node::User(index) = node else { return };
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
