//! Outputs and events of the machines.

use crate::fault::Fault;
use crate::net::{Node, Packet};
use crate::people::read_state;
use crate::world::{What, World};
use holdfast_proto::pool_element::{self, LinkOutput as Output, SessionEvent};
use holdfast_proto::pool_user;
use holdfast_wire::rserpool::asap::Message;
use std::time::Duration;

impl World {
    /// Carries out a machine's outputs, and sets its next wake-up.
    pub fn drain(&mut self, node: Node) {
        let before = self.number_of_outputs();
        match node {
            Node::Element(index) => {
                while let Some(output) = self.elements[index].machine.poll_output() {
                    self.carry_out(node, output, World::element_told);
                }
                while let Some(output) = self.elements[index].sessions.poll_output() {
                    self.carry_out(node, output, World::session_told);
                }
                let due = self.elements[index].machine.poll_timeout();
                if std::mem::replace(&mut self.elements[index].next_wake, due) != due {
                    self.wake_at(node, due);
                }
            }
            Node::User(index) => {
                while let Some(output) = self.users[index].machine.poll_output() {
                    self.carry_out(node, output, World::user_told);
                }
                let due = self.users[index].machine.poll_timeout();
                if std::mem::replace(&mut self.users[index].next_wake, due) != due {
                    self.wake_at(node, due);
                }
            }
            Node::Registrar(_) => {}
        }
        let outputs = self.number_of_outputs() - before;
        assert!(
            outputs < 200,
            "{node:?} gave {outputs} outputs for one input"
        );
    }

    fn number_of_outputs(&self) -> u64 {
        self.tally.get("output").copied().unwrap_or(0)
    }

    fn wake_at(&mut self, node: Node, due: Option<Duration>) {
        let asleep = match node {
            Node::User(_) => self.fault == Fault::UserSleeps,
            _ => self.fault == Fault::ElementSleeps,
        };
        if let Some(due) = due.filter(|_| !asleep) {
            self.at(due.saturating_sub(self.now), What::Wake { node });
        }
    }

    fn carry_out<E>(&mut self, node: Node, output: Output<E>, told: fn(&mut World, Node, E)) {
        self.count("output");
        match output {
            Output::Connect { link, to } => {
                self.connect(node, link, &to);
            }
            Output::Close { link } => self.close(node, link),
            Output::Send {
                message: Message::CookieEcho(_),
                ..
            } if self.fault == Fault::NoEcho => {}
            Output::Send { link, message } => self.send(node, link, Packet::asap(&message)),
            Output::Event(event) => told(self, node, event),
        }
    }

    fn element_told(&mut self, _: Node, event: pool_element::Event) {
        use pool_element::Event;
        self.count(match event {
            Event::Registered { .. } => "registered",
            Event::Refused(refusal) => panic!("{refusal}"),
            Event::Expired => "expired",
            Event::NewHome { .. } => "element: new home",
            Event::HomeLost => "element: home lost",
            Event::NoRegistrar => "element: no registrar",
            Event::Unanswered { .. } => "unanswered",
            Event::Reported(_) => "reported",
            Event::Left(_) => "left",
        });
    }

    fn session_told(&mut self, node: Node, event: SessionEvent) {
        let Node::Element(index) = node else { return };
        match event {
            SessionEvent::Resumed { link, state } => {
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

    fn user_told(&mut self, node: Node, event: pool_user::Event) {
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
                    Packet::Step {
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
