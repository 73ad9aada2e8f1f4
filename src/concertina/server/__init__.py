"""The interface of the live cluster: REST, server-sent events, metrics and the dashboard's files.

It writes what users ask for into the store and shows what the mirror knows. It decides nothing about jobs and calls
neither the controller nor a keeper: both read the store.
"""
