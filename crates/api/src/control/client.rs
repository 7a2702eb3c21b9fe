//! A client of the control API over the daemon's Unix socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::net::UnixStream;

use super::{
    DropList, ErrorBody, FlowDetail, FlowList, FlowListQuery, HandoffAccepted, HandoffList,
    HandoffRequest, HandoffState, HandoffStatus, MembershipChange, NodeList, PeerList,
    PlacementRequest, PlacementWeights, PoolDetail, PoolList, PoolQuery, RegistrarStatus,
    ReplicationAccepted, ReplicationList, ReplicationRequest, ServiceChangeRequest, ServiceChanged,
    ServiceList, Status, TakeoverRequest,
};

mod balancing;
mod joining;
mod load;
mod migrations;
mod pool;
use crate::FlowText;

/// The reason that a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon listens on the socket.
    #[error(
        "no daemon at {path}: {error} (is the daemon running, and may this user open the socket?)"
    )]
    NoDaemon {
        /// The socket's path.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The connection broke, or the peer did not send HTTP.
    #[error("the daemon's answer broke off: {0}")]
    Transport(#[from] hyper::Error),
    /// The daemon refused.
    #[error("{body}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The problem and its remedy.
        body: ErrorBody,
    },
    /// The answer has an unexpected form: the daemon may have another version.
    #[error("an answer that this version does not understand: {0}")]
    UnexpectedForm(#[from] serde_json::Error),
}

/// A client of the control API. Each request opens its own connection.
#[derive(Clone, Debug)]
pub struct ControlClient {
    path: PathBuf,
}

/// The delays between polls of a running handoff: the delay grows from the first to the last.
const POLL_DELAY_MIN: Duration = Duration::from_millis(1);
const POLL_DELAY_MAX: Duration = Duration::from_millis(100);

/// Flows per request when all are wanted: the daemon reads its whole table for each answer.
const FLOWS_PER_REQUEST: u64 = 8192;

impl ControlClient {
    /// Returns a client of the daemon with its control socket at `path`, without opening it.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_owned(),
        }
    }

    /// `GET /v1/status`.
    ///
    /// # Errors
    /// See [`ClientError`], as with all requests.
    pub async fn status(&self) -> Result<Status, ClientError> {
        self.get("/v1/status").await
    }

    /// `GET /v1/flows`: one page.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn flows(&self, query: &FlowListQuery) -> Result<FlowList, ClientError> {
        self.get(&format!("/v1/flows{}", query_text(query)?)).await
    }

    /// Returns all matching flows, in as many requests as needed.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn all_flows(&self, query: &FlowListQuery) -> Result<FlowList, ClientError> {
        let mut query = query.clone();
        query.limit = query.limit.or(Some(FLOWS_PER_REQUEST));
        let mut list = self.flows(&query).await?;
        while let Some(after) = list.next {
            query.after = Some(after);
            let more = self.flows(&query).await?;
            list.flows.extend(more.flows);
            list.next = more.next;
        }
        Ok(list)
    }

    /// `GET /v1/flows/{flow}`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn flow(&self, flow: &FlowText) -> Result<FlowDetail, ClientError> {
        self.get(&format!("/v1/flows/{}", percent_encode(&flow.to_string())))
            .await
    }

    /// `POST /v1/handoffs`: starts a handoff.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn hand_off(&self, request: &HandoffRequest) -> Result<HandoffAccepted, ClientError> {
        self.post("/v1/handoffs", request).await
    }

    /// `GET /v1/handoffs`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn handoffs(&self) -> Result<HandoffList, ClientError> {
        self.get("/v1/handoffs").await
    }

    /// `GET /v1/handoffs/{id}`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn handoff(&self, id: u64) -> Result<HandoffStatus, ClientError> {
        self.get(&format!("/v1/handoffs/{id}")).await
    }

    /// Waits until a handoff is finished; for a limit, wrap it in a timeout.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn wait_handoff(&self, id: u64) -> Result<HandoffStatus, ClientError> {
        let mut delay = POLL_DELAY_MIN;
        loop {
            let status = self.handoff(id).await?;
            if status.summary.state == HandoffState::Finished {
                return Ok(status);
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(POLL_DELAY_MAX);
        }
    }

    /// `GET /v1/nodes`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn nodes(&self) -> Result<NodeList, ClientError> {
        self.get("/v1/nodes").await
    }

    /// `POST /v1/group/leave`: returns when the node has left.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn leave_group(&self) -> Result<MembershipChange, ClientError> {
        self.post("/v1/group/leave", &()).await
    }

    /// `POST /v1/group/takeover`, with `force`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn force_takeover(&self) -> Result<MembershipChange, ClientError> {
        let request = TakeoverRequest { force: true };
        self.post("/v1/group/takeover", &request).await
    }

    /// `POST /v1/nodes/{name}/remove`: returns when the group has removed the node.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn remove_node(&self, name: &str) -> Result<MembershipChange, ClientError> {
        self.post(&format!("/v1/nodes/{name}/remove"), &()).await
    }

    /// `POST /v1/nodes/{name}/promote`: returns when the node is the contact node.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn promote_node(&self, name: &str) -> Result<MembershipChange, ClientError> {
        self.post(&format!("/v1/nodes/{name}/promote"), &()).await
    }

    /// `GET /v1/drops`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn drops(&self) -> Result<DropList, ClientError> {
        self.get("/v1/drops").await
    }

    /// `GET /v1/placement`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn placement(&self) -> Result<PlacementWeights, ClientError> {
        self.get("/v1/placement").await
    }

    /// `POST /v1/placement`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn set_placement(
        &self,
        request: &PlacementRequest,
    ) -> Result<PlacementWeights, ClientError> {
        self.post("/v1/placement", request).await
    }

    /// `GET /v1/services`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn services(&self) -> Result<ServiceList, ClientError> {
        self.get("/v1/services").await
    }

    /// `POST /v1/services`. The answer comes when the group has decided.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn change_services(
        &self,
        request: &ServiceChangeRequest,
    ) -> Result<ServiceChanged, ClientError> {
        self.post("/v1/services", request).await
    }

    /// `GET /v1/replications`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn replications(&self) -> Result<ReplicationList, ClientError> {
        self.get("/v1/replications").await
    }

    /// `POST /v1/replications`, at the contact node. The answer comes when the group has decided.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn change_replication(
        &self,
        request: &ReplicationRequest,
    ) -> Result<ReplicationAccepted, ClientError> {
        self.post("/v1/replications", request).await
    }

    /// `GET /v1/registrar`, of a registrar.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn registrar(&self) -> Result<RegistrarStatus, ClientError> {
        self.get("/v1/registrar").await
    }

    /// `GET /v1/pools`, of a registrar: one page.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pools(&self, query: &PoolQuery) -> Result<PoolList, ClientError> {
        self.get(&format!("/v1/pools{}", query_text(query)?)).await
    }

    /// Returns all pools ordered by their handles, in as many requests as needed.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn all_pools(&self, query: &PoolQuery) -> Result<PoolList, ClientError> {
        let mut query = query.clone();
        let mut list = self.pools(&query).await?;
        while let Some(after) = list.next {
            query.after = Some(after);
            let more = self.pools(&query).await?;
            list.pools.extend(more.pools);
            (list.next, list.total) = (more.next, more.total);
        }
        list.pools.sort_unstable_by(|a, b| a.handle.cmp(&b.handle));
        Ok(list)
    }

    /// `GET /v1/pools/{handle}`, of a registrar.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pool(&self, handle: &str) -> Result<PoolDetail, ClientError> {
        self.get(&format!("/v1/pools/{}", percent_encode(handle)))
            .await
    }

    /// `GET /v1/peers`, of a registrar.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn peers(&self) -> Result<PeerList, ClientError> {
        self.get("/v1/peers").await
    }

    /// `GET /metrics`: text in Prometheus format.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn metrics(&self) -> Result<String, ClientError> {
        let bytes = self.request(Method::GET, "/metrics", Bytes::new()).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        Ok(serde_json::from_slice(
            &self.request(Method::GET, path, Bytes::new()).await?,
        )?)
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ClientError> {
        let body = Bytes::from(serde_json::to_vec(body)?);
        Ok(serde_json::from_slice(
            &self.request(Method::POST, path, body).await?,
        )?)
    }

    async fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, ClientError> {
        let stream =
            UnixStream::connect(&self.path)
                .await
                .map_err(|error| ClientError::NoDaemon {
                    path: self.path.clone(),
                    error,
                })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // The connection ends with the sender; the request returns its error.
        let connection = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "holdfast")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .expect("the client makes no invalid request");
        let response = sender.send_request(request).await?;
        let status = response.status();
        let bytes = response.into_body().collect().await?.to_bytes();
        connection.abort();
        if status.is_success() {
            Ok(bytes)
        } else {
            Err(refusal(status, &bytes))
        }
    }
}

fn refusal(status: StatusCode, bytes: &[u8]) -> ClientError {
    let body = serde_json::from_slice(bytes).unwrap_or_else(|_| ErrorBody {
        error: format!("{status}: {}", String::from_utf8_lossy(bytes)),
        what_to_do: "see the daemon's log".into(),
    });
    ClientError::Refused {
        status: status.as_u16(),
        body,
    }
}

/// Encodes a flat structure as `?name=value&...`; absent fields are omitted.
fn query_text(query: &impl Serialize) -> Result<String, serde_json::Error> {
    let value = serde_json::to_value(query)?;
    let parts: Vec<String> = value
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, value)| !value.is_null())
        .map(|(name, value)| match value.as_str() {
            Some(text) => format!("{name}={}", percent_encode(text)),
            None => format!("{name}={}", percent_encode(&value.to_string())),
        })
        .collect();
    Ok(if parts.is_empty() {
        String::new()
    } else {
        format!("?{}", parts.join("&"))
    })
}

/// Percent-encodes all but the unreserved characters of RFC 3986, section 2.3.
fn percent_encode(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

/// A client for programs without an asynchronous runtime: runs one request of [`ControlClient`] to completion.
#[derive(Debug)]
pub struct BlockingControlClient {
    client: ControlClient,
    runtime: tokio::runtime::Runtime,
}

impl BlockingControlClient {
    /// Same as [`ControlClient::new`].
    ///
    /// # Errors
    /// When the system has no descriptors for a runtime.
    pub fn new(path: impl AsRef<Path>) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        Ok(Self {
            client: ControlClient::new(path),
            runtime,
        })
    }

    /// Runs one request: `client.run(|c| c.status())`. Must not be called within an asynchronous runtime.
    pub fn run<'a, R, F: Future<Output = R>>(
        &'a self,
        request: impl FnOnce(&'a ControlClient) -> F,
    ) -> R {
        self.runtime.block_on(request(&self.client))
    }
}

#[cfg(test)]
mod tests;
