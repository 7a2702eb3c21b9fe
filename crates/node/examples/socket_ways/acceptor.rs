//! The other host: a thread in a network namespace of its own.

use crate::{States, THREADS, done, new_namespace};
use holdfast_node::dataplane::Followed;
use holdfast_sys::process::sockets::{SocketStatic, Sockets};
use holdfast_sys::tcp_repair::WindowProbe;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

/// What the acceptor says to an order.
pub type Answer = Result<(), String>;

enum Order {
    Prepare(Vec<u8>),
    Inject(Vec<u8>, u64),
    Restore(Vec<u8>),
    Activate,
    Check,
}

/// Its orders and answers, as bytes, as between two hosts.
pub struct Acceptor {
    orders: SyncSender<Order>,
    answers: Receiver<Answer>,
}

impl Acceptor {
    pub fn start() -> Self {
        let (orders, inbox) = sync_channel(1);
        let (outbox, answers) = sync_channel(1);
        thread::spawn(move || serve(&inbox, &outbox));
        Self { orders, answers }
    }

    pub fn prepare(&self, sockets: &BTreeMap<u32, SocketStatic>) -> Result<(), Box<dyn Error>> {
        self.order(Order::Prepare(postcard::to_stdvec(sockets)?))
    }

    pub fn inject(&self, states: Vec<u8>, at_us: u64) -> Result<(), Box<dyn Error>> {
        self.order(Order::Inject(states, at_us))
    }

    pub fn restore(&self, message: Vec<u8>) -> Result<(), Box<dyn Error>> {
        self.order(Order::Restore(message))
    }

    pub fn activate(&self) -> Result<(), Box<dyn Error>> {
        self.order(Order::Activate)
    }

    /// All connections live.
    pub fn check(&self) -> Result<(), Box<dyn Error>> {
        self.order(Order::Check)
    }

    fn order(&self, order: Order) -> Result<(), Box<dyn Error>> {
        self.orders.send(order).map_err(|_| "the acceptor ended")?;
        done(self.answers.recv()?)
    }
}

fn serve(inbox: &Receiver<Order>, outbox: &SyncSender<Answer>) {
    let host = new_namespace().and_then(|()| {
        Ok(Host {
            sockets: Sockets::new()?,
            expected: 0,
        })
    });
    let mut host = match host {
        Ok(host) => host,
        Err(error) => {
            let _ = outbox.send(Err(error.to_string()));
            return;
        }
    };
    for order in inbox {
        let answer = host.obey(order).map_err(|error| error.to_string());
        if outbox.send(answer).is_err() {
            return;
        }
    }
}

struct Host {
    sockets: Sockets,
    expected: usize,
}

impl Host {
    fn obey(&mut self, order: Order) -> Result<(), Box<dyn Error>> {
        match order {
            Order::Prepare(bytes) => self.prepare(&postcard::from_bytes(&bytes)?),
            Order::Inject(bytes, at_us) => {
                let states: States = postcard::from_bytes(&bytes)?;
                Ok(self.sockets.inject(states, at_us, THREADS)?)
            }
            Order::Restore(bytes) => {
                type Message = (BTreeMap<u32, SocketStatic>, States, Option<u64>);
                let (options, states, at_us): Message = postcard::from_bytes(&bytes)?;
                match at_us {
                    Some(at_us) => {
                        self.sockets.restore_changed(states, at_us, THREADS)?;
                    }
                    None => {
                        self.prepare(&options)?;
                        self.sockets.restore_some(states, THREADS)?;
                    }
                }
                Ok(())
            }
            Order::Activate => Ok(self.sockets.activate(WindowProbe::No, THREADS)?),
            Order::Check => self.check(),
        }
    }

    fn prepare(&mut self, sockets: &BTreeMap<u32, SocketStatic>) -> Result<(), Box<dyn Error>> {
        let connections = |one: &&SocketStatic| matches!(one, SocketStatic::Connection(_));
        self.expected += sockets.values().filter(connections).count();
        Ok(self.sockets.prepare(sockets, &BTreeSet::new())?)
    }

    /// Every connection is established here.
    fn check(&mut self) -> Result<(), Box<dyn Error>> {
        let mut followed = Followed::new()?;
        for (id, socket, fixed) in self.sockets.iter() {
            if matches!(fixed, SocketStatic::Connection(_)) {
                followed.follow(id, socket)?;
            }
        }
        let since = Instant::now();
        while followed.look()?.states.len() != self.expected {
            if since.elapsed() > PATIENCE {
                return Err("connections are missing".into());
            }
        }
        Ok(())
    }
}
