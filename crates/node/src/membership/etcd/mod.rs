//! The store of views in etcd v3 (`group.store = "etcd"`).
//!
//! One thread for each endpoint has a connection to the JSON gateway of an etcd member, so that a member that hangs holds up
//! no other one. A read goes to all endpoints, and the first answer counts: each is linearizable, so a majority of etcd's
//! members has confirmed it. A proposal goes to one endpoint after the other until one answers; a repetition does no harm,
//! since the transaction compares the revision of the key.

mod base64;
mod client;
mod http;
mod messages;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc as thread_channel;

use holdfast_proto::membership::{StoreAnswer, StoreRequest, StoreToken};
use holdfast_sys::caps::keep_only_capabilities;
use holdfast_wire::membership_frames::NodeName;
use tokio::sync::mpsc;

use client::EtcdClient;
pub use client::EtcdError;

use crate::config::EtcdConfig;

/// Requests that wait for an endpoint's thread; further ones skip the endpoint.
const WAITING_REQUESTS_MAX: usize = 2;

/// Requests without an answer that are remembered.
const OPEN_REQUESTS_MAX: usize = 64;

/// An endpoint's answer to a request.
#[derive(Debug)]
pub(super) struct EndpointAnswer {
    endpoint: usize,
    token: StoreToken,
    result: Result<StoreAnswer, EtcdError>,
}

/// A request to etcd that no endpoint has answered.
struct OpenRequest {
    /// Endpoints that have the request.
    asked: usize,
    /// Endpoints that have failed.
    failed: usize,
    /// The proposal, and the number of endpoints that it was given to.
    proposal: Option<(StoreRequest, usize)>,
}

/// The store, as the driver sees it. Dropping the value ends the threads after the requests in progress.
pub(super) struct EtcdStore {
    endpoints: Vec<Endpoint>,
    open: BTreeMap<StoreToken, OpenRequest>,
    /// The endpoint that has answered last.
    preferred: usize,
}

struct Endpoint {
    url: String,
    requests: thread_channel::SyncSender<(StoreToken, StoreRequest)>,
    /// The last failure; none after an answer.
    failure: Option<String>,
}

impl EtcdStore {
    /// Starts the threads. Returns their answers too.
    ///
    /// # Errors
    /// A certificate or the password cannot be read, or the system refuses a thread.
    pub fn start(
        config: &EtcdConfig,
        group: &str,
        node: &NodeName,
    ) -> Result<(EtcdStore, mpsc::UnboundedReceiver<EndpointAnswer>), EtcdError> {
        let (sender, answers) = mpsc::unbounded_channel();
        let mut endpoints = Vec::with_capacity(config.endpoints.len());
        for position in 0..config.endpoints.len() {
            let client = EtcdClient::new(config, position, group, node)?;
            let url = config.endpoints[position].to_string();
            let (requests, receiver) = thread_channel::sync_channel(WAITING_REQUESTS_MAX);
            let sender = sender.clone();
            std::thread::Builder::new()
                .name(format!("etcd-{position}"))
                .spawn(move || serve_endpoint(position, client, &receiver, &sender))
                .map_err(EtcdError::Io)?;
            endpoints.push(Endpoint {
                url,
                requests,
                failure: None,
            });
        }
        let store = EtcdStore {
            endpoints,
            open: BTreeMap::new(),
            preferred: 0,
        };
        Ok((store, answers))
    }

    /// Passes a request of the machine on; returns an answer if there is none to wait for.
    pub fn send(&mut self, token: StoreToken, request: StoreRequest) -> Option<StoreAnswer> {
        while self.open.len() >= OPEN_REQUESTS_MAX {
            self.open.pop_first();
        }
        let asked = match &request {
            StoreRequest::Read => {
                let endpoints = self.endpoints.iter();
                let has_room = |endpoint: &&Endpoint| {
                    let requests = &endpoint.requests;
                    requests.try_send((token, StoreRequest::Read)).is_ok()
                };
                endpoints.filter(has_room).count()
            }
            StoreRequest::Propose { .. } => return self.propose(token, request, 0),
        };
        if asked == 0 {
            return Some(StoreAnswer::Unavailable);
        }
        let open = OpenRequest {
            asked,
            failed: 0,
            proposal: None,
        };
        self.open.insert(token, open);
        None
    }

    /// Gives a proposal to the next endpoint that takes it, after `tried` others.
    fn propose(
        &mut self,
        token: StoreToken,
        request: StoreRequest,
        tried: usize,
    ) -> Option<StoreAnswer> {
        let count = self.endpoints.len();
        for attempt in tried..count {
            let endpoint = &self.endpoints[(self.preferred + attempt) % count];
            if endpoint.requests.try_send((token, request.clone())).is_ok() {
                let open = OpenRequest {
                    asked: 1,
                    failed: 0,
                    proposal: Some((request, attempt + 1)),
                };
                self.open.insert(token, open);
                return None;
            }
        }
        Some(StoreAnswer::Unavailable)
    }

    /// Notes an endpoint's answer; returns the store's answer to the request, once.
    pub fn on_answer(&mut self, answer: EndpointAnswer) -> Option<(StoreToken, StoreAnswer)> {
        let token = answer.token;
        let failure = answer.result.as_ref().err().map(ToString::to_string);
        if let Some(endpoint) = self.endpoints.get_mut(answer.endpoint) {
            if let (Some(failure), None) = (&failure, &endpoint.failure) {
                tracing::warn!(endpoint = endpoint.url, failure, "etcd does not answer");
            }
            if failure.is_none() && endpoint.failure.is_some() {
                tracing::info!(endpoint = endpoint.url, "etcd answers again");
            }
            endpoint.failure = failure;
        }
        let open = self.open.get_mut(&token)?;
        if let Ok(answered) = answer.result {
            self.preferred = answer.endpoint;
            self.open.remove(&token);
            return Some((token, answered));
        }
        open.failed += 1;
        if open.failed < open.asked {
            return None;
        }
        let ended = self.open.remove(&token)?;
        let refused = match ended.proposal {
            Some((request, tried)) => self.propose(token, request, tried),
            None => Some(StoreAnswer::Unavailable),
        };
        refused.map(|answer| (token, answer))
    }

    /// Returns the endpoints that failed last, with the reasons, for the operator.
    pub fn failures(&self) -> String {
        let failing = self.endpoints.iter().filter_map(|endpoint| {
            let failure = endpoint.failure.as_ref()?;
            Some(format!("{}: {failure}", endpoint.url))
        });
        failing.collect::<Vec<_>>().join("; ")
    }
}

/// Reads the view at each endpoint once. Returns the endpoints that do not answer, with the reasons.
pub(crate) fn check_endpoints(
    config: &EtcdConfig,
    group: &str,
    node: &NodeName,
) -> Vec<(String, EtcdError)> {
    let check = |position: usize| {
        let client = EtcdClient::new(config, position, group, node);
        client.and_then(|mut client| client.carry_out(&StoreRequest::Read))
    };
    let urls = config.endpoints.iter().enumerate();
    let results = urls.map(|(position, url)| (url.to_string(), check(position)));
    results
        .filter_map(|(url, result)| Some((url, result.err()?)))
        .collect()
}

fn serve_endpoint(
    endpoint: usize,
    mut client: EtcdClient,
    requests: &thread_channel::Receiver<(StoreToken, StoreRequest)>,
    answers: &mpsc::UnboundedSender<EndpointAnswer>,
) {
    if let Err(error) = keep_only_capabilities(&[]) {
        tracing::warn!(%error, "the thread of an etcd endpoint keeps its capabilities");
    }
    for (token, request) in requests {
        let result = client.carry_out(&request);
        let answer = EndpointAnswer {
            endpoint,
            token,
            result,
        };
        if answers.send(answer).is_err() {
            return;
        }
    }
}

impl From<io::Error> for EtcdError {
    fn from(error: io::Error) -> EtcdError {
        EtcdError::Io(error)
    }
}
