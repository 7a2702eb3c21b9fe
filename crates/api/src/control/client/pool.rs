//! Requests to a pool daemon.

use super::{ClientError, ControlClient, percent_encode, query_text};
use crate::control::{
    OwnElementList, PoolDaemonStatus, ReportAccepted, Resolution, ResolveQuery, UnreachableReport,
};

impl ControlClient {
    /// `GET /v1/pool`, of a pool daemon.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pool_daemon(&self) -> Result<PoolDaemonStatus, ClientError> {
        self.get("/v1/pool").await
    }

    /// `GET /v1/elements`, of a pool daemon.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn own_elements(&self) -> Result<OwnElementList, ClientError> {
        self.get("/v1/elements").await
    }

    /// `GET /v1/resolve/{handle}`, of a pool daemon.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn resolve(
        &self,
        handle: &str,
        query: &ResolveQuery,
    ) -> Result<Resolution, ClientError> {
        let query = query_text(query)?;
        self.get(&format!("/v1/resolve/{}{query}", percent_encode(handle)))
            .await
    }

    /// `GET /v1/select/{handle}`, of a pool daemon.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn select(&self, handle: &str) -> Result<Resolution, ClientError> {
        self.get(&format!("/v1/select/{}", percent_encode(handle)))
            .await
    }

    /// `POST /v1/unreachable`, of a pool daemon.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn report_unreachable(
        &self,
        report: &UnreachableReport,
    ) -> Result<ReportAccepted, ClientError> {
        self.post("/v1/unreachable", report).await
    }
}
